"""What an engine is: the thing that starts one agent per node. All the rest of a launch is the same everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.agent import AgentSpec
    from airdist.channel import Channel

__all__ = ["AgentProcess", "Engine"]


class AgentProcess(Protocol):
    """A started agent, as its owner sees it."""

    @property
    def channel(self) -> Channel:
        """The owner's end of the conversation; it blocks."""

    def alive(self) -> bool:
        """Whether the agent still runs, for the case that the channel cannot tell."""

    def close(self, seconds: float) -> None:
        """Wait for the agent's end, make it end if it does not within `seconds`, and free what it held."""


class Engine(Protocol):
    """A place where agents can be started."""

    @property
    def name(self) -> str:
        """What `engine=` calls it."""

    def start(self, spec: AgentSpec, environ: Mapping[str, str]) -> AgentProcess:
        """Start the agent of this node with `environ` as its environment, and send it its spec."""
