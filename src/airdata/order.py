"""Which sample comes when, and who reads it: pure functions of numbers.

    (seed, epoch, n) ──► EpochOrder: position in the epoch ──► row of the manifest
    (n, samples served, world size, batch size, uneven) ──► Schedule: the positions that a rank's worker reads

The order of an epoch is one flat list that knows nothing of ranks, workers or batches. With ``c`` samples already
served, global step ``k`` takes positions ``c + kG`` to ``c + (k+1)G``, where ``G = world size x batch size``; rank
``r`` takes the ``r``-th slice of a step, and worker ``w`` of ``W`` the steps ``k = w (mod W)``. That is the round robin
in which PyTorch drains its workers, so a training loop sees the same order for every number of workers, and one integer
(``c``) resumes it on any world size, worker count and batch size without reading what was passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

__all__ = ["EpochOrder", "Positions", "Schedule", "Uneven"]

Positions = npt.NDArray[np.int64]
Uneven = Literal["keep", "drop", "pad"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)

# Up to here an epoch is shuffled by sorting keys (0.1 s and 4 MiB for a million samples, in every worker); above it
# each position is mapped on its own, which needs no memory and starts anywhere in constant time.
SORTED_UP_TO = 1 << 20

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_ROUNDS = 6
# Positions are produced this many at a time: one numpy call serves many samples, and a first sample is not kept
# waiting.
_BLOCK = 512


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


class EpochOrder:
    """The order of one epoch: ``order[positions]`` are the samples at these positions, as rows of the manifest.

    Args:
        seed: of the shuffle.
        epoch: each epoch has another order.
        samples: how many there are; positions run from 0 to ``samples - 1``.
        shuffle: without it, the order is the manifest's.
    """

    def __init__(self, seed: int, epoch: int, samples: int, *, shuffle: bool) -> None:
        self.samples = samples
        self._key = mix(seed, epoch)
        self._shuffle = shuffle
        self._table: npt.NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, positions: Positions) -> Positions:
        if not self._shuffle:
            return positions
        if self.samples > SORTED_UP_TO:
            return permute(self._key, self.samples, positions)
        if self._table is None:
            # Keys are distinct, since mixing is a bijection, so the sort has one answer.
            keys = _mix(np.arange(self.samples, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(self._key))
            self._table = np.argsort(keys).astype(np.uint32)
        return self._table[positions].astype(np.int64)


def permute(key: int, samples: int, positions: Positions) -> Positions:
    """Map positions one by one through a permutation of ``range(samples)``.

    A Feistel network over the next even number of bits, walked along its cycle until it lands inside (Black, Rogaway:
    Ciphers with Arbitrary Finite Domains, 2002). Fewer than four rounds of the network on average, since its domain is
    less than four times ``samples``.
    """
    half = np.uint64(((max(samples - 1, 1)).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]
    result = positions.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        left, right = result[outside] >> half, result[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        walked = (left << half) | right
        result[outside] = walked
        outside = outside[walked >= np.uint64(samples)]
    return result.astype(np.int64)


@dataclass(frozen=True)
class Schedule:
    """Who reads which positions of an epoch, from ``start`` on.

    Attributes:
        samples: in the whole epoch.
        start: samples of it that were served before.
        world_size: ranks.
        batch_size: samples of a rank's batch.
        uneven: what becomes of the last step, when fewer samples are left than it takes. ``"keep"`` deals them in
            contiguous slices that differ by at most one, so every sample is read once, and ranks may get shorter
            batches or, with fewer samples than ranks, none. ``"drop"`` leaves them out and ``"pad"`` goes on from the
            beginning of the order, so that all ranks get the same number of full batches.
    """

    samples: int
    start: int = 0
    world_size: int = 1
    batch_size: int = 1
    uneven: Uneven = "keep"

    @property
    def step_size(self) -> int:
        """Samples of a full step of all ranks."""
        return self.world_size * self.batch_size

    @property
    def full_steps(self) -> int:
        """Steps in which every rank has a full batch without padding."""
        return (self.samples - self.start) // self.step_size

    @property
    def tail(self) -> int:
        """Samples that fill no whole step."""
        return (self.samples - self.start) % self.step_size

    @property
    def steps(self) -> int:
        """Steps of the job; a rank may have one less, see :meth:`batches`."""
        return self.full_steps + (1 if self.tail and self.uneven != "drop" else 0)

    @property
    def same_batches(self) -> bool:
        """Whether every rank gets the same number of batches."""
        return self.uneven != "keep" or not 0 < self.tail < self.world_size

    @property
    def trouble(self) -> str:
        """What a training loop should be warned of; "" when all is well."""
        if not self.same_batches:
            return (
                f"{self.world_size - self.tail} of {self.world_size} ranks get one batch less than the others "
                f"({self.samples - self.start} samples, batch size {self.batch_size}). Collectives in the training "
                "step would hang: use uneven='drop' to leave the last samples out, or uneven='pad' to repeat some."
            )
        if self.uneven == "drop" and self.samples and not self.start and not self.full_steps:
            return (
                f"there is no batch at all: {self.samples} samples do not fill one step of {self.world_size} ranks "
                f"with batch size {self.batch_size}, and uneven='drop'. Use a smaller batch, or uneven='pad'."
            )
        return ""

    def span(self, step: int, rank: int) -> range:
        """The positions of a rank's batch; those of a padded step run past the end and wrap around."""
        first = self.start + step * self.step_size
        if step < self.full_steps or self.uneven == "pad":
            first += rank * self.batch_size
            return range(first, first + self.batch_size)
        share, more = divmod(self.tail, self.world_size)
        first += rank * share + min(rank, more)
        return range(first, first + share + (1 if rank < more else 0))

    def batches(self, rank: int) -> int:
        """How many batches a rank gets."""
        return self.full_steps + (1 if self.steps > self.full_steps and self.span(self.full_steps, rank) else 0)

    def length(self, rank: int, worker: int = 0, workers: int = 1, steps: int | None = None) -> int:
        """How many samples one worker of a rank reads, in all or in the first ``steps`` of its own steps."""
        mine = len(range(worker, self.steps, workers))
        mine = mine if steps is None else min(steps, mine)
        last = worker + (mine - 1) * workers
        if not mine or last < self.full_steps:
            return mine * self.batch_size
        return (mine - 1) * self.batch_size + len(self.span(last, rank))

    def served(self, steps: int) -> int:
        """Samples of the epoch that have been served after ``steps`` steps of all ranks."""
        return min(self.start + steps * self.step_size, self.samples)

    def positions(self, rank: int, worker: int = 0, workers: int = 1, passed: int = 0) -> Iterator[Positions]:
        """The positions one worker of a rank reads, in blocks.

        Args:
            rank: 0 to ``world_size - 1``.
            worker: index of the worker in its rank.
            workers: workers of the rank.
            passed: leave out this many positions from the beginning; takes constant time.
        """
        skipped, offset = divmod(passed, self.batch_size)
        step = worker + skipped * workers
        at_once = max(1, _BLOCK // self.batch_size) * workers
        within = np.arange(self.batch_size, dtype=np.int64) + (self.start + rank * self.batch_size)
        while step < self.full_steps:
            steps = np.arange(step, min(step + at_once, self.full_steps), workers, dtype=np.int64)
            yield (steps[:, None] * self.step_size + within).ravel()[offset:]  # (steps, batch) -> (steps x batch,)
            offset = 0
            step += len(steps) * workers
        if step < self.steps:
            span = self.span(step, rank)[offset:]
            if len(span):
                yield np.arange(span.start, span.stop, dtype=np.int64) % self.samples
