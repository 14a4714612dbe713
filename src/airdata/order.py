"""Which sample comes when: pure functions of numbers.

    (seed, epoch, n, groups) ──► EpochOrder: position in the epoch ──► row of the manifest

The order of an epoch is one flat list that knows nothing of ranks, workers or batches; :mod:`airdata.schedule` deals
its positions to them. With ``groups`` every file belongs to one group for good, and position ``p`` holds a file of
group ``p mod groups``. Any stretch of positions then draws evenly from all groups, and where the number of nodes
divides that of groups, a node that reads the positions ``p = node (mod nodes)`` reads the same files in every epoch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SORTED_UP_TO", "EpochOrder", "Positions", "mix", "permute", "sort_keys"]

Positions = npt.NDArray[np.int64]

# Up to here an epoch is shuffled by sorting keys (0.1 s and 4 MiB for a million samples, in every worker); above it
# each position is mapped on its own, which needs no memory and starts anywhere in constant time.
SORTED_UP_TO = 1 << 20

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_ROUNDS = 6
# Files are dealt to groups by a shuffle of this seed, the same in every run: sorted names have patterns (image, label,
# image, label), which a group must not pick out, and what a node has in its cache shall be of use to its next run.
_DEALING_SEED = 0x0A1D


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

    A bijection, and our own hash rather than ``numpy.random``, whose shuffles may change between versions (NEP 19): a
    saved position must mean the same samples for ever.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mix(*numbers: int) -> int:
    """One well-mixed 64-bit number from several."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = _mix((state ^ np.uint64(number & _MASK64)) + np.uint64(_GOLDEN))
    return int(state[0])


def sort_keys(key: int, numbers: Positions) -> npt.NDArray[np.uint64]:
    """What to sort numbers by to shuffle them: distinct, since mixing is a bijection, so the sort has one answer."""
    return _mix(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


class EpochOrder:
    """The order of one epoch: ``order[positions]`` are the samples at these positions, as rows of the manifest.

    Args:
        seed: of the shuffle.
        epoch: each epoch has another order.
        samples: how many there are; positions run from 0 to ``samples - 1``.
        shuffle: without it, the order is the manifest's.
        groups: files are dealt to so many groups, the same in every epoch, and take turns by group.
    """

    def __init__(self, seed: int, epoch: int, samples: int, *, shuffle: bool, groups: int = 1) -> None:
        self.samples = samples
        self._key = mix(seed, epoch)
        self._shuffle = shuffle
        self._groups = groups
        self._dealing = EpochOrder(_DEALING_SEED, 0, samples, shuffle=True) if groups > 1 and shuffle else None
        self._table: npt.NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, positions: Positions) -> Positions:
        if not self._shuffle:
            return positions
        if self.samples > SORTED_UP_TO:
            return self._dealt(self._mapped(positions))
        if self._table is None:
            self._table = self._dealt(self._sorted()).astype(np.uint32)
        return self._table[positions].astype(np.int64)

    def _dealt(self, slots: Positions) -> Positions:
        return slots if self._dealing is None else self._dealing[slots]

    def _sorted(self) -> Positions:
        """The whole order."""
        slots = np.arange(self.samples, dtype=np.int64)
        shuffled = np.argsort(sort_keys(self._key, slots))
        if self._groups == 1:
            return shuffled
        # Sorted by group alone, the slots of each stay shuffled; then the groups take turns.
        turn, group = np.divmod(slots, self._groups)
        by_group = shuffled[np.argsort(shuffled % self._groups, kind="stable")]
        sizes = np.bincount(group, minlength=self._groups)
        begins = np.cumsum(sizes) - sizes
        taking_turns: Positions = by_group[begins[group] + turn]
        return taking_turns

    def _mapped(self, positions: Positions) -> Positions:
        """As :meth:`_sorted` does, position by position."""
        if self._groups == 1:
            return permute(self._key, self.samples, positions)
        turn, group = np.divmod(positions, self._groups)
        sizes = (self.samples - group + self._groups - 1) // self._groups
        largest = -(-self.samples // self._groups)
        return permute(self._key, largest, turn, number=group, limits=sizes) * self._groups + group


def permute(
    key: int,
    samples: int,
    positions: Positions,
    *,
    number: Positions | None = None,
    limits: Positions | None = None,
) -> Positions:
    """Map positions one by one through a permutation of ``range(samples)``.

    A Feistel network over the next even number of bits, walked along its cycle until it lands inside (Black, Rogaway:
    Ciphers with Arbitrary Finite Domains, 2002). Fewer than four rounds of the network on average, since its domain is
    less than four times ``samples``.

    Args:
        key: of the permutation.
        samples: how many there are.
        positions: what to map, 0 to ``samples - 1``.
        number: for each position, which of many permutations of this key it goes through.
        limits: for each position, how many there are in its permutation, if that may be a few less than ``samples``.

    Returns:
        For each position its image.
    """
    ends = np.full(len(positions), samples, np.uint64) if limits is None else limits.astype(np.uint64)
    tweaks = np.zeros(len(positions), np.uint64) if number is None else _mix(number.astype(np.uint64))
    half = np.uint64((max(samples - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = [np.uint64(mix(key, step)) for step in range(_ROUNDS)]
    result = positions.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        left, right, tweak = result[outside] >> half, result[outside] & mask, tweaks[outside]
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + (round_key ^ tweak)) & mask)
        walked = (left << half) | right
        result[outside] = walked
        outside = outside[walked >= ends[outside]]
    return result.astype(np.int64)
