"""What an engine is: the thing that has one agent started on each node. All else of a launch is the same everywhere.

    Engine.start(order) ──> Agents ── channel ──> agent of node 0

An engine for other machines derives from `RemoteEngine` (`airdist.engines.remote`), which has the agents call back, and
writes one method: `spawn(command)`, to start `command.argv(node)` once on each node and tell how that goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.channel import Channel
    from airdist.spec import AgentSpec

__all__ = ["Agents", "Engine", "HasFileno", "Order"]


class HasFileno(Protocol):
    """What a selector takes."""

    def fileno(self) -> int:
        """The descriptor."""


@dataclass(frozen=True)
class Order:
    """What a launch wants of its engine.

    Attributes:
        job: name of the launch, unique.
        spec: what the agents are to run.
        directory: the caller's run directory.
        environ: environment of the agent that runs on the caller's own machine. For others, see `AgentSpec.remote`.
        options: what the user said in `engine_options`.
    """

    job: str
    spec: AgentSpec
    directory: Path
    environ: Mapping[str, str] = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)


class Agents(Protocol):
    """The agents of a launch, as its caller sees them."""

    @property
    def channel(self) -> Channel | None:
        """The caller's end of the conversation with the agent of node 0; None while that has not called."""

    @property
    def job_id(self) -> str | None:
        """What the scheduler calls the job, where there is one."""

    def waits(self) -> list[HasFileno]:
        """What has to be served when it is readable, besides the channel."""

    def serve(self) -> None:
        """Serve agents that call, without blocking.

        Raises:
            LaunchError: when they are not going to come; it says why.
        """

    def alive(self) -> bool:
        """Whether the agent of node 0 may still have something to say, for the case that the channel cannot tell."""

    def words(self) -> str:
        """What agents or engine have left as an explanation of their end."""

    def again(self, *, attempt: int, timeout: float | None) -> bool:
        """Have agents started again after a node was lost or taken away, or say that this engine does not."""

    def share(self, outcome: Callable[[], bytes]) -> None:
        """Give the outcome of the launch to the processes on other nodes that wait for it, where there are such."""

    def close(self, seconds: float) -> None:
        """Wait for the agents' end, make them end if they do not within `seconds`, and free what they held."""


class Engine(Protocol):
    """A place where agents can be started."""

    name: ClassVar[str]
    """What `engine=` calls it."""

    local: ClassVar[bool]
    """Whether its one agent runs on the caller's machine, and shares devices and run directory with it."""

    def check(self, *, nodes: int, options: Mapping[str, Any]) -> None:
        """Refuse what this engine cannot do, before anything is made.

        Raises:
            LaunchError: with what is possible.
        """

    def start(self, order: Order) -> Agents:
        """Have one agent started on each node; does not wait for them."""
