"""The ranks of one node as their agent holds them: processes, pipes, log files, and how far each has come.

A rank writes to two pipes; every byte goes to its log file first and then, if there is room, to the caller. A caller
that does not keep up loses sight of some output and never holds a rank up; the file is always complete.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from airdist import processes
from airdist.channel import Channel
from airdist.environ import rank_environ
from airdist.world import RankState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.rundir import RunDirectory
    from airdist.spec import AgentSpec
    from airdist.world import Place

__all__ = ["Node", "Rank"]

_READ = 1 << 16
_DISPLAY_BYTES = 4 << 20  # output on its way to a caller that is not reading; more is shown only by the file


class Rank(RankState):
    """One rank that this agent has started.

    Args:
        place: where its node stands.
        local_rank: its rank there.
        host: name of its machine.
        process: the rank.
        control: how it talks to this agent.
        log: file of its complete output.

    Attributes:
        pipes: stream (1 or 2) of each descriptor that its output comes from.
        ready: whether its program has begun.
    """

    def __init__(
        self,
        place: Place,
        local_rank: int,
        host: str,
        *,
        process: subprocess.Popen[bytes],
        control: Channel,
        log: BinaryIO,
    ) -> None:
        super().__init__(place.first + local_rank, place.node, host)
        self.process = process
        self.control = control
        self.log = log
        self.pipes: dict[int, int] = {}
        self.ready = False


class Node:
    """Starts and serves the ranks of one attempt at a time; a leader decides when what happens.

    Args:
        spec: what to run; its `nprocs` is known by now.
        directory: run directory, on this machine.
        environ: environment of the ranks, but for what tells them apart.
        selector: what the agent waits on.
        owner: where output goes that is to be seen.
    """

    def __init__(
        self,
        spec: AgentSpec,
        directory: RunDirectory,
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        owner: Channel,
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._environ = environ
        self._selector = selector
        self._owner = owner
        self._host = socket.gethostname()
        self.ranks: list[Rank] = []
        self.show = spec.forward_logs

    @property
    def nprocs(self) -> int:
        """Ranks of this node."""
        return self._spec.nprocs or 1

    def start(self, place: Place, listener: socket.socket | None = None) -> None:
        """Start the ranks of an attempt; rank 0, on the first node, gets the socket that listens for the store."""
        self.ranks = [self._start_rank(local, place, listener) for local in range(self.nprocs)]
        self._owner.send("started", attempt=place.attempt, pids=[rank.process.pid for rank in self.ranks])

    def _start_rank(self, local_rank: int, place: Place, listener: socket.socket | None) -> Rank:
        spec, number = self._spec, place.first + local_rank
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno()]
        if listener is not None and number == 0:
            inherited.append(listener.fileno())
        run_dir = str(self._directory.path)
        process = subprocess.Popen(
            [
                *(sys.executable, *processes.program("airdist.rank")),
                *(run_dir, str(place.attempt), str(os.getpid()), *map(str, inherited)),
            ],
            env={
                **self._environ,
                **rank_environ(
                    local_rank=local_rank,
                    nprocs=self.nprocs,
                    place=place,
                    launch_dir=run_dir,
                    job=spec.job or self._directory.path.name,
                    max_restarts=spec.max_restarts,
                    visible=spec.visible[local_rank] if spec.visible else None,
                ),
            },
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,
        )
        theirs.close()
        os.set_blocking(ours.fileno(), False)
        log = self._directory.log(number, place.attempt).open("ab", buffering=0)
        rank = Rank(place, local_rank, self._host, process=process, control=Channel(ours), log=log)
        assert process.stdout is not None
        assert process.stderr is not None
        rank.pipes = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
        for pipe in rank.pipes:
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._on_output(rank, pipe))
        self._selector.register(rank.control, selectors.EVENT_READ, lambda: self._on_control(rank))
        return rank

    @property
    def gone(self) -> bool:
        """Whether every rank has ended."""
        return all(rank.gone for rank in self.ranks)

    def family(self) -> list[int]:
        """Pids of all living processes that came from the ranks."""
        if sys.platform == "linux":
            return processes.descendants(os.getpid())
        return [rank.process.pid for rank in self.ranks if rank.returncode is None]

    def reap(self) -> None:
        """Take notice of every child that has ended: ranks, and orphans of ranks."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for rank in self.ranks:
                    if rank.process.pid == ended[0]:
                        self._on_end(rank, os.waitstatus_to_exitcode(ended[1]))

    def release(self, *, terminate: bool) -> None:
        """Let the ranks that have delivered leave, and ask the others to end if told so."""
        for rank in self.ranks:
            if rank.outcome is not None:
                rank.control.send("bye")
            elif terminate and rank.returncode is None:
                rank.stopped = True
                processes.kill([rank.process.pid], signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have every rank that still works write down its stacks; native code is no obstacle to `faulthandler`."""
        for rank in self.ranks:
            if rank.ready and rank.outcome is None and rank.returncode is None:
                processes.kill([rank.process.pid], signal.SIGUSR2)

    def stacks_complete(self) -> bool:
        """Whether all stacks asked for are there; the dump ends with the main thread, whose last line is its module."""
        return all(
            self._directory.stacks(rank.rank).read_bytes().rstrip().endswith((b"in <module>", b"<no Python frame>"))
            for rank in self.ranks
            if rank.ready and rank.outcome is None and rank.returncode is None
        )

    def close(self) -> None:
        """Read the pipes to their end and close everything, ready for another attempt."""
        for rank in self.ranks:
            self._drain(rank)
            self._drop(rank, *rank.pipes)
            if not rank.control.closed:
                self._selector.unregister(rank.control)
            rank.control.close()
            rank.log.close()

    def _on_output(self, rank: Rank, pipe: int) -> bool:
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return False
        if not data:
            self._drop(rank, pipe)
            return False
        self._write(rank, data)
        if self.show and self._owner.pending < _DISPLAY_BYTES and not self._owner.closed:
            self._owner.send("log", rank=rank.rank, stream=rank.pipes[pipe], data=data)
        return True

    def _on_control(self, rank: Rank) -> None:
        for message in rank.control.receive():
            if message["kind"] == "ready":
                rank.ready = True
                continue
            if rank.stopped:
                rank.control.send("bye")  # it has cleaned up within its grace; nobody waits for what it delivers
            else:
                rank.outcome, rank.summary, rank.at = message["outcome"], message["summary"], message["at"]
            if message["traceback"]:
                # The traceback belongs in the file too, after what the rank wrote before it; the cell shows it once,
                # with the exception.
                self._drain(rank)
                self._write(rank, message["traceback"].encode())
        if rank.control.closed:
            self._selector.unregister(rank.control)

    def _on_end(self, rank: Rank, returncode: int) -> None:
        if not rank.control.closed:
            self._on_control(rank)  # its last word may have come in together with its end
        rank.returncode = rank.process.returncode = returncode
        rank.at = rank.at or time.monotonic()
        rank.summary = rank.summary or (
            f"ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"left with exit code {returncode}"
        )

    def _drain(self, rank: Rank) -> None:
        """Read what is in a rank's pipes now: 64 KiB each, unless somebody widened them, and then 1 MiB at most."""
        for pipe in list(rank.pipes):
            for _ in range((1 << 20) // _READ):
                if not self._on_output(rank, pipe):
                    break

    @staticmethod
    def _write(rank: Rank, data: bytes) -> None:
        view = memoryview(data)
        with suppress(OSError):  # a full disk costs log lines, not the training
            while view:
                view = view[rank.log.write(view) :]

    def _drop(self, rank: Rank, *pipes: int) -> None:
        for pipe in pipes:
            self._selector.unregister(pipe)
            stream = rank.process.stdout if rank.pipes.pop(pipe) == 1 else rank.process.stderr
            assert stream is not None
            stream.close()
