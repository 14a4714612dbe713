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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from airdist import processes
from airdist.channel import Channel
from airdist.environ import rank_environ

if TYPE_CHECKING:
    from airdist.agent import AgentSpec
    from airdist.rundir import RunDirectory

__all__ = ["Node", "Rank"]

_READ = 1 << 16
_DISPLAY_BYTES = 4 << 20  # output on its way to a caller that is not reading; more is shown only by the file
_HOST = "127.0.0.1"
# As in engines/local.py: our own directory last, and the user's working directory not at all.


@dataclass
class Rank:
    """One rank of one attempt.

    Attributes:
        outcome: "value" or "error" once the rank has delivered.
        returncode: as `subprocess` has it (negative: a signal) once it has ended.
        stopped: whether it was asked to end before it had delivered; what it says or does afterwards is no failure.
        at: time of the outcome or, for want of one, of the end, on the clock that all processes of a host share.
    """

    rank: int
    process: subprocess.Popen[bytes]
    control: Channel
    log: BinaryIO
    pipes: dict[int, int] = field(default_factory=dict)
    ready: bool = False
    outcome: str | None = None
    summary: str = ""
    returncode: int | None = None
    stopped: bool = False
    at: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it raised, or ended without a word, of its own accord."""
        return self.outcome == "error" or (self.outcome is None and self.returncode is not None and not self.stopped)

    def report(self) -> dict[str, Any]:
        """What the owner is told of it."""
        return {
            "rank": self.rank,
            "outcome": self.outcome,
            "summary": self.summary,
            "returncode": self.returncode,
            "stopped": self.stopped,
            "at": self.at,
        }


class Node:
    """Starts and serves the ranks of one attempt at a time; its agent decides when what happens."""

    def __init__(
        self, spec: AgentSpec, directory: RunDirectory, selector: selectors.BaseSelector, owner: Channel
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._selector = selector
        self._owner = owner
        self.ranks: list[Rank] = []

    def start(self, attempt: int) -> None:
        """Start all ranks of an attempt, around a store address on which a socket listens already."""
        # The port is never free between its choice and its use: the socket itself is handed to rank 0
        # (pytorch/pytorch#85604 and many more chose a port first and found it taken later).
        with socket.create_server((_HOST, 0), backlog=max(128, 4 * self._spec.nprocs)) as listener:
            self.ranks = [self._start_rank(rank, attempt, listener) for rank in range(self._spec.nprocs)]
        self._owner.send("started", attempt=attempt, pids=[rank.process.pid for rank in self.ranks])

    def _start_rank(self, number: int, attempt: int, listener: socket.socket) -> Rank:
        spec = self._spec
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), *([listener.fileno()] if number == 0 else [])]
        process = subprocess.Popen(
            [
                *(sys.executable, *processes.program("airdist.rank")),
                *(spec.run_dir, str(attempt), str(os.getpid()), *map(str, inherited)),
            ],
            env=os.environ
            | rank_environ(
                rank=number,
                nprocs=spec.nprocs,
                address=listener.getsockname()[:2],
                launch_dir=spec.run_dir,
                attempt=attempt,
                max_restarts=spec.max_restarts,
                visible=spec.visible[number] if spec.visible else None,
            ),
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,
        )
        theirs.close()
        os.set_blocking(ours.fileno(), False)
        log = self._directory.log(number, attempt).open("ab", buffering=0)
        rank = Rank(number, process, Channel(ours), log)
        assert process.stdout is not None
        assert process.stderr is not None
        rank.pipes = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
        for pipe in rank.pipes:
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._on_output(rank, pipe))
        self._selector.register(rank.control, selectors.EVENT_READ, lambda: self._on_control(rank))
        return rank

    @property
    def delivered(self) -> bool:
        """Whether every rank has delivered what it returned."""
        return all(rank.outcome == "value" for rank in self.ranks)

    @property
    def failed(self) -> bool:
        """Whether a rank has raised or died."""
        return any(rank.failed for rank in self.ranks)

    @property
    def settled(self) -> bool:
        """Whether nothing more is to come from any rank."""
        return all(rank.outcome or rank.returncode is not None for rank in self.ranks)

    @property
    def gone(self) -> bool:
        """Whether every rank has ended."""
        return all(rank.returncode is not None for rank in self.ranks)

    def first_failure(self) -> dict[str, Any]:
        """Rank and summary of the earliest failure, if there is one."""
        failed = min((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.at, default=None)
        return {} if failed is None else {"rank": failed.rank, "summary": failed.summary}

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
        if self._spec.forward_logs and self._owner.pending < _DISPLAY_BYTES and not self._owner.closed:
            self._owner.send("log", rank=rank.rank, stream=rank.pipes[pipe], data=data.decode("latin-1"))
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
