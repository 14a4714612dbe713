"""The local engine: one agent, on this machine, as a child of this process and in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airdist import processes
from airdist.channel import Channel
from airdist.errors import LaunchError
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.engines.base import HasFileno, Order

__all__ = ["LocalAgent", "LocalEngine"]


@dataclass(frozen=True)
class LocalAgent:
    """An agent that is a child process.

    Attributes:
        channel: the owner's end of the conversation; it blocks.
        process: the agent.
        directory: its run directory, which is the caller's.
    """

    channel: Channel
    process: subprocess.Popen[bytes]
    directory: RunDirectory
    job_id: ClassVar[None] = None

    def waits(self) -> list[HasFileno]:
        """Nothing: the agent is there already."""
        return []

    def serve(self) -> None:
        """Nobody calls."""

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def words(self) -> str:
        """The end of its output."""
        from airdist.failure import tail  # noqa: PLC0415 - for an agent that died

        return "; ".join(tail(self.directory.agent_log))

    def again(self, *, attempt: int, timeout: float | None) -> bool:  # noqa: ARG002 - the protocol's
        """No: there is no other machine."""
        return False

    def share(self, outcome: Callable[[], bytes]) -> None:
        """Nobody else waits."""

    def close(self, seconds: float) -> None:
        """Wait for the process to end, and kill it (and by that its ranks) if it does not within `seconds`."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.channel.close()


class LocalEngine:
    """Starts the agent as a child of the calling process."""

    name: ClassVar[str] = "local"
    local: ClassVar[bool] = True

    def check(self, *, nodes: int, options: Mapping[str, Any]) -> None:
        """Refuse more than this machine."""
        if nodes != 1:
            raise LaunchError(f"nodes={nodes}: engine='local' reaches this machine only; leave nodes at 1")
        if options:
            raise LaunchError(f"engine_options: engine='local' has none, so {', '.join(sorted(options))} mean nothing")

    def start(self, order: Order) -> LocalAgent:
        """Start an agent; its own output goes to the run directory.

        Nothing is forked that would go on running this program, so a caller that has used CUDA or has threads is safe.
        """
        ours, theirs = socket.socketpair()
        directory = RunDirectory(order.directory)
        with theirs, directory.agent_log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", *processes.program("airdist.agent"), str(theirs.fileno())],
                env=dict(order.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        channel = Channel(ours)
        channel.send("spec", **order.spec._replace(owner=os.getpid())._asdict())
        return LocalAgent(channel, process, directory)
