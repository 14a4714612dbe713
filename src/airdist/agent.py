"""The agent: starts the ranks of one node, watches them and its owner, ends them, and tells how it went.

    caller ── owner channel ──> agent ──┬── control channel, stdout and stderr pipes ──> rank 0
                                        └── ...

It is a process of its own so that no rank outlives its launch: it notices that the caller is gone when the owner
channel ends, the kernel ends its ranks when it dies itself, and being single-threaded it may ask the kernel for that.
It imports the standard library only, installs its signal handlers in its own process instead of the caller's, and
holds the deadline, which a suspended or busy caller must not extend.

The first message of the owner is an `AgentSpec`. The agent answers with `started`, `log`, `restarting` and, last,
`ended`. Later the owner may say `stop` (end the ranks within their grace) and `kill` (end them now).
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airdist import processes
from airdist.channel import Channel
from airdist.environ import LAUNCH_RUN_ID
from airdist.node import Node
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Agent", "AgentSpec", "main"]

_SETTLE_SECONDS = 0.25  # peers of a failed rank that are about to fail by themselves get to say so
_FINISH_SECONDS = 30.0  # to flush and run exit handlers, once every value has been delivered
_FAILURE_GRACE_SECONDS = 2.0  # peers of a failed rank are most likely stuck in a collective
_STOP_GRACE_SECONDS = 10.0
_ORPHAN_GRACE_SECONDS = 2.0  # nobody waits for them any more
_REAP_SECONDS = 5.0  # a process in uninterruptible sleep does not die of SIGKILL; it is named and left
_STACKS_SECONDS = 1.0
_TICK_SECONDS = 0.5
_TRACKING_SECONDS = 30.0  # to import MLflow on a busy machine, and say one thing to its server


@dataclass(frozen=True)
class AgentSpec:
    """What an agent is asked to run.

    Attributes:
        run_dir: run directory, which holds the payload.
        nprocs: ranks to start.
        cwd: working directory of the ranks.
        timeout: seconds from now, over all attempts, or None.
        grace: seconds between asking a rank to end and ending it; None: 10, and 2 after a rank's failure.
        max_restarts: attempts beyond the first.
        visible: `CUDA_VISIBLE_DEVICES` of each rank, or None where the ranks share the node's.
        forward_logs: whether the owner wants to see output as it comes.
        owner: pid of the owner where it is this process's parent (the engine knows).
    """

    run_dir: str
    nprocs: int
    cwd: str
    timeout: float | None = None
    grace: float | None = None
    max_restarts: int = 0
    visible: list[str] | None = None
    forward_logs: bool = True
    owner: int | None = None


class Agent:
    """Runs one spec to its end."""

    def __init__(self, spec: AgentSpec, owner: Channel) -> None:
        self._spec = spec
        self._owner = owner
        self._directory = RunDirectory(Path(spec.run_dir))
        self._deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
        self._selector = selectors.DefaultSelector()
        self._node = Node(spec, self._directory, self._selector, owner)
        self._stop: str | None = None
        self._kill = False
        self._ending = False

    def take(self, message: dict[str, Any]) -> None:
        """Do what the owner says: `stop` or `kill`."""
        self._stop = self._stop or "cancelled"
        self._kill = self._kill or message["kind"] == "kill"

    def run(self) -> None:
        """Run attempts until one ends otherwise than by the failure of a rank, or none is left."""
        self._watch_owner()
        self._watch_children()
        for attempt in range(self._spec.max_restarts + 1):
            reason, leftovers = self._attempt(attempt)
            failed = self._node.first_failure()
            expired = self._deadline is not None and time.monotonic() >= self._deadline
            if reason != "failed" or self._stop or expired or attempt == self._spec.max_restarts:
                break
            self._owner.send("restarting", attempt=attempt + 1, **failed)
        self._owner.send(
            "ended", reason=reason, attempt=attempt, leftovers=leftovers, ranks=[r.report() for r in self._node.ranks]
        )
        while self._owner.pending and not self._owner.closed:
            self._pump(lambda: not self._owner.pending, _TICK_SECONDS)
        if reason == "abandoned":
            self._end_tracking()

    @staticmethod
    def _end_tracking() -> None:
        """Have the MLflow run ended, which the caller would have done, in a process that may import MLflow."""
        if LAUNCH_RUN_ID in os.environ:
            command = [sys.executable, *processes.program("airdist.tracking.run", "end_abandoned")]
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(command, timeout=_TRACKING_SECONDS, check=False)

    def _attempt(self, attempt: int) -> tuple[str, list[int]]:
        node = self._node
        node.start(attempt)
        remaining = None if self._deadline is None else self._deadline - time.monotonic()
        self._pump(lambda: self._stop or node.failed or node.delivered, remaining)
        grace = _STOP_GRACE_SECONDS
        if self._stop:
            reason = self._stop
        elif node.failed:
            reason, grace = "failed", _FAILURE_GRACE_SECONDS
            self._pump(lambda: self._stop or node.settled, _SETTLE_SECONDS)
        elif node.delivered:
            reason = "finished"
        else:
            reason = "timeout"
            node.dump_stacks()
            self._pump(lambda: self._stop or node.stacks_complete(), _STACKS_SECONDS)
            if node.delivered:  # they came in meanwhile; hours of work are not to be lost by a fraction of a second
                reason = "finished"
        return reason, self._end(reason, grace if self._spec.grace is None else self._spec.grace)

    def _end(self, reason: str, grace: float) -> list[int]:
        """Let delivered ranks go, ask the others to end, then end whatever is left; return the pids that withstood."""
        self._ending = True
        if self._owner.closed:
            grace = min(grace, _ORPHAN_GRACE_SECONDS)
        self._node.release(terminate=reason != "finished")
        self._pump(lambda: self._kill or self._node.gone, _FINISH_SECONDS if reason == "finished" else grace)
        deadline = time.monotonic() + _REAP_SECONDS
        # Ending a parent may bring forth an orphan that is ours from then on, so look until there is none.
        while (left := self._node.family()) and time.monotonic() < deadline:
            processes.kill(left)
            self._pump(lambda: not self._node.family(), 0.05)
        self._pump(lambda: self._node.gone, max(0.0, deadline - time.monotonic()))
        self._node.close()
        self._ending = False
        return left

    def _pump(self, until: Callable[[], object], seconds: float | None) -> None:
        """Serve everything that happens until a condition holds or a time has passed (None: no limit)."""
        end = None if seconds is None else time.monotonic() + seconds
        while not until():
            wait = _TICK_SECONDS if end is None else min(_TICK_SECONDS, end - time.monotonic())
            if wait <= 0:
                return
            if not self._owner.closed:
                write = selectors.EVENT_WRITE if self._owner.pending else 0
                self._selector.modify(self._owner, selectors.EVENT_READ | write, self._on_owner)
            for key, _ in self._selector.select(wait):
                if key.fileobj in self._selector.get_map():  # not closed by an earlier one of this round
                    key.data()
            # A process that the caller forked holds a copy of its end, so the end of the channel alone may never come.
            if self._spec.owner is not None and os.getppid() != self._spec.owner:
                self._lose_owner()

    def _watch_owner(self) -> None:
        self._selector.register(self._owner, selectors.EVENT_READ, self._on_owner)

    def _on_owner(self) -> None:
        self._owner.flush()
        for message in self._owner.receive():
            self.take(message)
        if self._owner.closed:
            self._lose_owner()

    def _lose_owner(self) -> None:
        if self._owner in self._selector.get_map():
            self._selector.unregister(self._owner)
        self._owner.closed = True
        if not self._stop:
            print("the caller is gone; ending its ranks", flush=True)
        self._stop = self._stop or "abandoned"
        self._kill = self._kill or self._ending  # the ranks know already, and nobody waits for them any more

    def _watch_children(self) -> None:
        """Make the end of a child, and a request to end, wake the selector."""
        awake, wake = os.pipe()
        for end in (awake, wake):
            os.set_blocking(end, False)

        def on_wake() -> None:
            with suppress(BlockingIOError):
                while os.read(awake, 1 << 10):
                    pass
            self._node.reap()

        def on_term(*_: object) -> None:
            self._stop = self._stop or "cancelled"

        signal.signal(signal.SIGTERM, on_term)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            # A handler that does nothing, and not SIG_IGN, which the ranks would inherit.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(awake, selectors.EVENT_READ, on_wake)


def main() -> None:
    """Entry point: `python -m airdist.agent FD`, where FD is the agent's end of the owner channel."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    owner = Channel(sock)
    messages: list[dict[str, Any]] = []
    while not messages and not owner.closed:
        messages = owner.receive()
    if messages:
        spec = AgentSpec(**{key: value for key, value in messages[0].items() if key != "kind"})
        os.set_blocking(sock.fileno(), False)
        processes.adopt_orphans()
        agent = Agent(spec, owner)
        for message in messages[1:]:  # an owner that changed its mind at once
            agent.take(message)
        agent.run()


if __name__ == "__main__":
    main()
