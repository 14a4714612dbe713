"""What agents tell one another of the world of one attempt: where a node stands in it, and how far a rank has come."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Place", "RankState"]


class Place(NamedTuple):
    """A node's share of an attempt.

    Attributes:
        attempt: how often the launch was restarted before.
        node: rank of the node.
        nodes: number of nodes.
        first: global rank of the node's first rank.
        world_size: ranks on all nodes.
        address: host and port of the store, as this node reaches it.
    """

    attempt: int
    node: int
    nodes: int
    first: int
    world_size: int
    address: tuple[str, int]


_REPORTED = ("rank", "node", "host", "outcome", "summary", "returncode", "stopped", "lost", "at")


class RankState:
    """How far one rank of one attempt has come.

    Attributes:
        rank: global rank.
        node: rank of its node.
        host: name of its machine.
        outcome: "value" or "error" once the rank has delivered.
        summary: the failure on one line.
        returncode: as `subprocess` has it (negative: a signal) once it has ended.
        stopped: whether it was asked to end before it had delivered; what it says or does afterwards is no failure.
        lost: what is known of the disappearance of its node, or "".
        at: time of the outcome or, for want of one, of the end, on the clock that all processes of a host share.
    """

    def __init__(
        self,
        rank: int,
        node: int = 0,
        host: str = "",
        *,
        outcome: str | None = None,
        summary: str = "",
        returncode: int | None = None,
        stopped: bool = False,
        lost: str = "",
        at: float = 0.0,
    ) -> None:
        self.rank = rank
        self.node = node
        self.host = host
        self.outcome = outcome
        self.summary = summary
        self.returncode = returncode
        self.stopped = stopped
        self.lost = lost
        self.at = at

    @property
    def failed(self) -> bool:
        """Whether it raised, or ended without a word, of its own accord."""
        silent = self.outcome is None and (self.returncode is not None or bool(self.lost)) and not self.stopped
        return self.outcome == "error" or silent

    @property
    def settled(self) -> bool:
        """Whether nothing more is to come from it."""
        return self.outcome is not None or self.gone

    @property
    def gone(self) -> bool:
        """Whether it has ended, as far as anybody will ever know."""
        return self.returncode is not None or bool(self.lost)

    def report(self) -> dict[str, Any]:
        """What an owner is told of it."""
        return {name: getattr(self, name) for name in _REPORTED}
