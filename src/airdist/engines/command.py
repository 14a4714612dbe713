"""What an engine of several machines is asked for: one command for each node, and word of what became of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from airdist import processes
from airdist.environ import SECRET

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COMMON_OPTIONS", "AgentCommand", "Meeting", "Spawned"]

COMMON_OPTIONS = frozenset({"start_timeout", "queue_timeout", "heartbeat", "python"})
"""What every engine of several machines has in `engine_options`."""


@dataclass(frozen=True)
class AgentCommand:
    """What an engine is to run once on each node.

    Attributes:
        job: name of the launch.
        nodes: how many nodes.
        addresses: where agents call the caller, "host:port", the likeliest first.
        secret: what they prove to know; it belongs in their environment, and in no argument, file or log.
        directory: the caller's run directory; `directory / "logs"` is the place for what the engine itself writes.
        options: the engine's own part of the user's `engine_options`.
        seconds: how long an agent tries to reach the others.
        timeout: how long the launch may take, once its agents are there, or None.
        python: the interpreter on the nodes.
    """

    job: str
    nodes: int
    addresses: tuple[str, ...]
    secret: str = field(repr=False)
    directory: Path
    options: Mapping[str, Any]
    seconds: float
    timeout: float | None
    python: str = sys.executable

    def argv(self, node: int | str) -> list[str]:
        """The command line of an agent.

        Args:
            node: rank of the node, or the name of an environment variable there that holds it.
        """
        where = [self.job, str(node), str(self.nodes), ",".join(self.addresses), f"{self.seconds:g}"]
        return [self.python, *processes.program("airdist.arrival"), *where]

    def environ(self) -> dict[str, str]:
        """What has to be in the environment of an agent, beside what its machine gives it."""
        return {SECRET: self.secret, "PYTHONUNBUFFERED": "1"}


class Spawned(Protocol):
    """The processes that an engine has started, or asked a scheduler to start."""

    @property
    def job_id(self) -> str | None:
        """What the scheduler calls the job, or None."""

    def state(self) -> str:
        """`queued` (waits for machines), `running`, or `ended` (no agent will come any more). Cheap, called often."""

    def words(self) -> str:
        """What the engine or the agents have left as an explanation, such as the last lines of their output, or ""."""

    def again(self) -> bool:
        """Start all agents again, or see to it that the scheduler does; False if that cannot be."""

    def close(self, seconds: float) -> None:
        """Wait for the processes to end, end them after `seconds`, and free what they hold. Called twice, harmless."""


@dataclass(frozen=True)
class Meeting:
    """What the agents of a launch and its caller have in common.

    Attributes:
        job: name of the launch; None: that of its run directory.
        port: where the caller listens; 0: any port that is free.
        secret: None: a new one.
    """

    job: str | None = None
    port: int = 0
    secret: str | None = field(default=None, repr=False)
