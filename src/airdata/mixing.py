"""How several sources are mixed by weight: pure functions of numbers.

    weights, sizes ──► shares: samples of each source in an epoch
    (seed, epoch, shares) ──► Mixture: slot of the epoch ──► row of the sources' files

A source is a deck of cards: it is shuffled, dealt over as many epochs as it lasts, and shuffled again when it runs
out. So no file comes again before all others of its source have come, a source with a small weight shows other files in
each epoch until all were shown, and one with a large weight repeats its files evenly. An epoch has as many samples as
the sources have files. Which card is dealt is a function of the epoch and the slot, so a mixture resumes like all else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from airdata.order import SORTED_UP_TO, Positions, mix, permute, sort_keys

__all__ = ["Mixture", "shares"]


def shares(weights: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...]:
    """How many samples of each source an epoch has: in proportion to the weights, as many in all as there are files.

    Largest remainders are rounded up, and no source gets less than one sample.

    Args:
        weights: of the sources, in any unit.
        sizes: files of each source, at least one.

    Raises:
        ValueError: a weight is not positive, or a source has no files.
    """
    if len(weights) != len(sizes) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"weights={list(weights)} must be a positive number for each of {len(sizes)} sources")
    if not all(sizes):
        raise ValueError(f"source {list(sizes).index(0)} has a weight and no files")
    # Every source has its one sample; what is left is dealt so that the sum comes as near to the weights as it can.
    samples, total = sum(sizes), sum(map(Fraction, weights))
    exact = [Fraction(weight) / total * samples for weight in weights]
    dealt = [max(1, math.floor(one)) for one in exact]
    while (left := samples - sum(dealt)) != 0:
        step = 1 if left > 0 else -1
        able = [source for source, count in enumerate(dealt) if count + step > 0]
        source = max(able, key=lambda one: step * (exact[one] - dealt[one]))
        dealt[source] += step
    return tuple(dealt)


class Mixture:
    """The samples of one epoch: ``mixture[slots]`` are the files at these slots, numbered through all sources.

    Args:
        seed: of the shuffle.
        epoch: its number.
        sizes: files of each source.
        shares: samples of each source in an epoch; its slots lie together, one source after the other.
    """

    def __init__(self, seed: int, epoch: int, sizes: Sequence[int], shares: Sequence[int]) -> None:
        self._sources = [
            _Deck(mix(seed, source, 1), epoch, *pair) for source, pair in enumerate(zip(sizes, shares, strict=True))
        ]
        self._ends = np.cumsum(shares)
        self._begins = self._ends - shares
        self._offsets = np.cumsum(sizes) - sizes

    def __getitem__(self, slots: Positions) -> Positions:
        source_of = np.searchsorted(self._ends, slots, side="right")
        rows = np.empty_like(slots)
        for source in np.unique(source_of).tolist():
            mine = source_of == source
            rows[mine] = self._offsets[source] + self._sources[source].deal(slots[mine] - self._begins[source])
        return rows


class _Deck:
    """The cards that one source deals in one epoch: a stretch of a sequence of shuffled decks that never ends."""

    def __init__(self, key: int, epoch: int, size: int, share: int) -> None:
        self._key = key
        self._size = size
        self._first = epoch * share
        self._share = share
        self._table: npt.NDArray[np.uint32] | None = None

    def deal(self, numbers: Positions) -> Positions:
        """The cards that are dealt as number 0 to ``share - 1`` of the epoch."""
        deck, card = np.divmod(self._first + numbers, self._size)
        if self._share + 2 * self._size > SORTED_UP_TO:
            return permute(self._key, self._size, card, number=deck)
        first = self._first // self._size
        if self._table is None:  # of all decks that the epoch touches
            decks = (self._first + self._share - 1) // self._size + 1 - first
            cards = np.arange(first * self._size, (first + decks) * self._size, dtype=np.int64)
            keys = sort_keys(self._key, cards).reshape(decks, self._size)
            self._table = np.argsort(keys, axis=1).astype(np.uint32)
        cards_dealt: Positions = self._table[deck - first, card].astype(np.int64)
        return cards_dealt
