"""Which checkpoints are worth keeping: small policies, joined by "any of them".

published steps ──► each policy names those it keeps ──union──► what no policy keeps has expired

No I/O: whether a step is valid, and what it scored, is asked through :class:`Candidate`, and only when a policy wants
to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

__all__ = ["Candidate", "KeepBest", "KeepEvery", "KeepLast", "Pinned", "Policy", "expired"]


@dataclass(frozen=True)
class Candidate:
    """A published step.

    Attributes:
        step: its number.
        look: reads the metrics that were saved with it; None when the checkpoint is damaged.
    """

    step: int
    look: Callable[[], Mapping[str, float] | None]

    @cached_property
    def _found(self) -> Mapping[str, float] | None:
        return self.look()

    @property
    def valid(self) -> bool:
        """Whether its files are all there; storage is asked once."""
        return self._found is not None

    @property
    def metrics(self) -> Mapping[str, float]:
        """What it scored; empty when damaged."""
        return self._found or {}


class Policy(Protocol):
    """Names the steps it wants kept."""

    def keeps(self, candidates: Sequence[Candidate]) -> set[int]:
        """The steps to keep, of candidates in descending order; the first one was published just now."""
        ...


@dataclass(frozen=True)
class KeepLast:
    """The newest ``count`` valid steps; a damaged one does not count, and one among them stays."""

    count: int

    def __post_init__(self) -> None:
        _check_positive("KeepLast", self.count)

    def keeps(self, candidates: Sequence[Candidate]) -> set[int]:
        """See :class:`Policy`."""
        kept: set[int] = set()
        counted = 0
        for position, candidate in enumerate(candidates):
            if counted == self.count:
                break
            kept.add(candidate.step)
            # The newest was published a moment ago, after everything in it was checked.
            counted += position == 0 or candidate.valid
        return kept


@dataclass(frozen=True)
class KeepEvery:
    """Every step that is a multiple of ``interval``, for good."""

    interval: int

    def __post_init__(self) -> None:
        _check_positive("KeepEvery", self.interval)

    def keeps(self, candidates: Sequence[Candidate]) -> set[int]:
        """See :class:`Policy`."""
        return {candidate.step for candidate in candidates if candidate.step % self.interval == 0}


@dataclass(frozen=True)
class KeepBest:
    """The ``count`` valid steps with the lowest, or highest, value of a metric given to ``save``.

    A step without the metric, or with NaN, is never among the best. Of equals the newer one wins.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        _check_positive("KeepBest", self.count)
        if self.mode not in {"min", "max"}:
            raise ValueError(f"mode={self.mode!r} must be 'min' or 'max'")

    def keeps(self, candidates: Sequence[Candidate]) -> set[int]:
        """See :class:`Policy`."""
        sign = 1 if self.mode == "min" else -1
        scores = [
            (sign * candidate.metrics[self.metric], position)
            for position, candidate in enumerate(candidates)
            if not math.isnan(candidate.metrics.get(self.metric, math.nan))
        ]
        return {candidates[position].step for _, position in sorted(scores)[: self.count]}


@dataclass(frozen=True)
class Pinned:
    """These steps, for good: the one that a paper was written with."""

    steps: Iterable[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", frozenset(self.steps))

    def keeps(self, candidates: Sequence[Candidate]) -> set[int]:
        """See :class:`Policy`."""
        return {candidate.step for candidate in candidates} & set(self.steps)


def expired(candidates: Iterable[Candidate], current: int, policies: Sequence[Policy]) -> list[int]:
    """The steps that no policy keeps, oldest first.

    Args:
        candidates: published steps, in any order.
        current: the step just published. It stays, and newer ones are none of our business.
        policies: none keep everything.
    """
    if not policies:
        return []
    mine = sorted((c for c in candidates if c.step <= current), key=lambda c: c.step, reverse=True)
    kept = {current}.union(*(policy.keeps(mine) for policy in policies))
    return [candidate.step for candidate in reversed(mine) if candidate.step not in kept]


def _check_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name}({value}): the number must be positive")
