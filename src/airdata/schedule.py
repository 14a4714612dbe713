"""Who reads what of an epoch: pure functions of numbers.

    (n, samples served, ranks, nodes, batch size, uneven) ──► Schedule: the positions that a rank's worker reads

With ``c`` samples already served, global step ``k`` takes positions ``c + kG`` to ``c + (k+1)G`` of the order, where
``G = world size x batch size``; rank ``r`` takes the ``r``-th slice of a step, and worker ``w`` of ``W`` the steps
``k = w (mod W)``. That is the round robin in which PyTorch drains its workers, so a training loop sees the same order
for every number of workers, and one integer (``c``) resumes it on any world size, worker count and batch size without
reading what was passed.

Where files belong to nodes, node ``m`` of ``M`` takes the positions ``p = m (mod M)`` of a step, and its ranks take
slices of those. Steps hold the same samples as before, since every ``G`` positions in a row have ``G / M`` of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from airdata.order import Positions

__all__ = ["UNEVEN", "Schedule", "Uneven"]

Uneven = Literal["keep", "drop", "pad"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)

# Positions are produced this many at a time: one numpy call serves many samples, and a first sample is not kept
# waiting.
_BLOCK = 512


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
        nodes: of equally many ranks in a row, when each reads its own positions of a step. With ``"pad"``, it goes on
            from the beginning of those.
    """

    samples: int
    start: int = 0
    world_size: int = 1
    batch_size: int = 1
    uneven: Uneven = "keep"
    nodes: int = 1

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
        """The positions of a rank's batch; those of a padded step run past the end, see :meth:`wrapped`."""
        ranks = self.world_size // self.nodes
        node, local_rank = divmod(rank, ranks)
        first = self._first(step, node)
        if step < self.full_steps or self.uneven == "pad":
            skipped, count = local_rank * self.batch_size, self.batch_size
        else:
            share, more = divmod(len(range(first, self.samples, self.nodes)), ranks)
            skipped, count = local_rank * share + min(local_rank, more), share + (local_rank < more)
        first += skipped * self.nodes
        return range(first, first + count * self.nodes, self.nodes)

    def _first(self, step: int, node: int) -> int:
        """The first position of a step that is a node's to read."""
        first = self.start + step * self.step_size
        return first + (node - first) % self.nodes

    def wrapped(self, positions: Positions) -> Positions:
        """Positions past the end, as those of the beginning that the same node reads."""
        turn, node = np.divmod(positions, self.nodes)
        turns = (self.samples - node + self.nodes - 1) // self.nodes
        # With fewer samples than nodes, a node must read those of another.
        wrapped: Positions = turn % turns * self.nodes + node if turns.all() else positions % self.samples
        return wrapped

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
        span = self.span(0, rank) if self.full_steps else range(0)
        within = np.arange(span.start, span.stop, span.step, dtype=np.int64)
        while step < self.full_steps:
            steps = np.arange(step, min(step + at_once, self.full_steps), workers, dtype=np.int64)
            yield (steps[:, None] * self.step_size + within).ravel()[offset:]  # (steps, batch) -> (steps x batch,)
            offset = 0
            step += len(steps) * workers
        if step < self.steps:
            span = self.span(step, rank)[offset:]
            if len(span):
                yield self.wrapped(np.arange(span.start, span.stop, span.step, dtype=np.int64))
