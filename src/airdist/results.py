"""What a launch returns: a list, by rank."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Results"]

R = TypeVar("R")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160


class Results(list[R]):
    """Return values by rank: `results[0]` is what rank 0 returned. An ordinary list that prints with its ranks.

    Attributes:
        ranks: the rank that each value came from; 0, 1, ... unless only this process's own is known.
    """

    def __init__(self, values: Iterable[R] = (), *, ranks: Iterable[int] | None = None) -> None:
        super().__init__(values)
        self.ranks = tuple(range(len(self)) if ranks is None else ranks)

    def __repr__(self) -> str:
        """One line for each rank, long values shortened."""
        labels = self.ranks if len(self.ranks) == len(self) else range(len(self))
        lines = [f"  rank {rank}: {_SHORT.repr(value)}" for rank, value in zip(labels, self, strict=True)]
        return "\n".join([f"Results, a list by rank ({len(self)})", *lines])
