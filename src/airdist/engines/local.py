"""The local engine: one agent, on this machine, as a child of this process and in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from airdist import processes
from airdist.channel import Channel
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.agent import AgentSpec

__all__ = ["LocalAgent", "LocalEngine"]


@dataclass(frozen=True)
class LocalAgent:
    """An agent that is a child process.

    Attributes:
        channel: the owner's end of the conversation.
        process: the agent.
    """

    channel: Channel
    process: subprocess.Popen[bytes]

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

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

    name = "local"

    def start(self, spec: AgentSpec, environ: Mapping[str, str]) -> LocalAgent:
        """Start an agent; its own output goes to the run directory.

        Nothing is forked that would go on running this program, so a caller that has used CUDA or has threads is safe.
        """
        ours, theirs = socket.socketpair()
        with theirs, RunDirectory(Path(spec.run_dir)).agent_log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", *processes.program("airdist.agent"), str(theirs.fileno())],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        channel = Channel(ours)
        channel.send("spec", **asdict(replace(spec, owner=os.getpid())))
        return LocalAgent(channel, process)
