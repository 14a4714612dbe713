"""DataLoader: PyTorch's, that knows what the training loop has received.

iter(loader) ──► plan (topology, agreement, position) ──► PyTorch's iterator over Tracked datasets and sealed batches
next(...)    ──► open the parcel ──► count it as received ──► the batch
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler

from airdata.dataset import UCVolumeDataset
from airdata.delivery import Delivery, LoaderStats
from airdata.errors import StateError
from airdata.metrics import Counters, Reporter
from airdata.position import share
from airdata.received import Received
from airdata.state import Start
from airdata.tracked import OnWorker, Seal, Tracked, let_workers_go
from airdata.wrappers import find_sources

__all__ = ["DataLoader", "LoaderStats"]

_log = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)

DEFAULT_WORKERS = 6
DEFAULT_PREFETCH_FACTOR = 4
# The batch in the loop's hands, and one being made.
_BATCHES_IN_USE = 2


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """PyTorch's ``DataLoader`` for a :class:`UCVolumeDataset`, or for datasets wrapped around one.

    It tells the dataset its batch size, counts what the training loop has received, and saves and restores that
    position. Other datasets work as with PyTorch's own; they have no position.

    An iteration that reaches its end makes the next epoch current, so a shuffled dataset has another order each time.
    ``state_dict()`` right after the last batch is the end of that epoch (resumed, it yields nothing and then the next
    epoch); after the loop has ended it is the beginning of the next one. An iteration that is left early begins anew.

    Args:
        dataset: the source, or a dataset that reads from it.
        batch_size: samples of a batch; None when the dataset makes batches itself.
        shuffle: see PyTorch; a ``UCVolumeDataset`` has a ``shuffle`` of its own.
        sampler: see PyTorch.
        batch_sampler: see PyTorch.
        num_workers: processes that read and decode. 6 by default, but no more than cores or batches there are for this
            rank; 0 reads in the training process. The same on all ranks.
        collate_fn: see PyTorch.
        pin_memory: see PyTorch; by default, when there is a CUDA device.
        drop_last: drop batches that are not full; the same as ``uneven="drop"`` of the dataset.
        timeout: see PyTorch.
        worker_init_fn: see PyTorch.
        multiprocessing_context: see PyTorch; fork, spawn and forkserver all work.
        generator: where the seeds of workers come from; by default one of the loader's own, set by
            ``torch.manual_seed`` and the position. Making an iterator then takes no number from the global generator,
            unlike PyTorch's, so a resumed run goes on with the same dropout as one that was never stopped.
        prefetch_factor: batches each worker makes ahead; 4 by default.
        persistent_workers: see PyTorch; they hear of ``set_epoch`` and ``load_state_dict`` too.
        pin_memory_device: see PyTorch.
        in_order: see PyTorch.
    """

    state_speaks_for_all_ranks = True
    """For checkpoints: any rank's state restores all, or is refused; see :meth:`state_dict`."""

    def __init__(  # noqa: PLR0917 - PyTorch's signature
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001 - PyTorch's signature
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,  # noqa: FBT001
        drop_last: bool = False,  # noqa: FBT001, FBT002
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        # A map-style dataset that knows a source has no order in which it reads it.
        sources = find_sources(dataset) if isinstance(dataset, IterableDataset) else []
        if shuffle and sources:
            raise ValueError("shuffle=True belongs to the dataset: UCVolumeDataset(..., shuffle=True, seed=...)")
        workers = _default_workers() if num_workers is None else num_workers
        if prefetch_factor is None and workers > 0:
            prefetch_factor = DEFAULT_PREFETCH_FACTOR
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            workers,
            collate_fn,
            torch.cuda.is_available() if pin_memory is None else pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor if workers > 0 else None,
            persistent_workers=persistent_workers and workers > 0,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._may_lower_workers = num_workers is None
        self._sources = sources
        self._starts: list[Start] = []
        self._tracked: Tracked | None = None
        self._controls: list[torch.Tensor] = []
        self._done: torch.Tensor | None = None
        self._stats = LoaderStats()
        self._reporter: Reporter | None = None
        # The name is Accelerate's: its `prepare` leaves such a loader as it is. Otherwise it shares the batches of each
        # rank out among the ranks a second time, and every rank silently loses all but a part of its files.
        self._is_accelerate_prepared = bool(sources)
        for source in sources:
            source.batch_size = batch_size or 1

    # --- position ---

    @property
    def sources(self) -> list[UCVolumeDataset]:
        """The datasets of files that this loader reads from.

        Raises:
            StateError: there is none, so there is no position.
        """
        if not self._sources:
            raise StateError(
                f"no UCVolumeDataset was found in {type(self.dataset).__name__}, so there is no position to save. A "
                "wrapper must keep its source in an attribute (self.source = source)."
            )
        return self._sources

    def state_dict(self) -> dict[str, Any]:
        """The position of what the training loop has received: plain ints and strings, the same on every rank.

        Valid for any other world size, worker count and batch size. Behind a wrapper that drops samples, makes several
        of one file or reads one dataset after the other, ``source`` is not empty, and the position is that of this rank
        on this topology. With several sources there is one such state for each: ``{"source_0": …, "source_1": …}``.

        Raises:
            StateError: there is no position; see :attr:`sources`.
        """
        states = [source.state_dict() for source in self.sources]
        return states[0] if len(states) == 1 else {f"source_{number}": state for number, state in enumerate(states)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position: the next iteration yields the rest of its epoch, the one after it a whole one.

        Raises:
            StateError: it does not fit this dataset; says what differs.
        """
        sources = self.sources
        if len(sources) == 1:
            sources[0].load_state_dict(state_dict)
            return
        names = [f"source_{number}" for number in range(len(sources))]
        if set(state_dict) != set(names):
            raise StateError(
                f"this loader reads {len(sources)} datasets, whose positions are {', '.join(names)}; the state has "
                f"{', '.join(map(str, state_dict)) or 'nothing'}"
            )
        for name, source in zip(names, sources, strict=True):
            source.load_state_dict(state_dict[name])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads; see :meth:`UCVolumeDataset.set_epoch`."""
        for source in self._sources:
            source.set_epoch(epoch)

    def stats(self) -> LoaderStats:
        """What was handed out, waited for and fetched so far."""
        files = Counters()
        for source in self._sources:
            files.add(source.stats())
        mine = self._stats
        return LoaderStats(mine.batches, mine.fetch_seconds, mine.loop_seconds, files)

    def _totals(self) -> dict[str, float]:
        return self.stats().files.as_metrics()

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; what wrappers drop or add is not known."""
        if len(self._sources) != 1:
            return super().__len__()
        schedule, rank = self._sources[0].schedule(self.batch_size or 1, drop_last=self.drop_last)
        return schedule.batches(rank)

    # --- iteration ---

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # PyTorch names its own iterator class
        if self._reporter is None:
            self._reporter = Reporter()
            self._reporter.watch(self._totals)
        if not self._sources:
            return Delivery(self._stats, self._reporter, super().__iter__())
        self._lower_workers()
        batch_size, self._starts = self.batch_size or 1, []
        for source in self._sources:
            start = source.plan(
                batch_size=batch_size,
                drop_last=self.drop_last,
                workers=max(1, self.num_workers),
                keep=((self.prefetch_factor or 0) + _BATCHES_IN_USE) * batch_size,
            )
            self._starts.append(start)
        if len({start.turn for start in self._starts}) > 1:
            raise StateError("the positions of this loader's datasets were not saved at the same time")
        if self._iterator is not None and self._done is not None:
            for control, start in zip(self._controls, self._starts, strict=True):
                control.copy_(torch.tensor(start.pack()))
            self._done.zero_()
        inner = super().__iter__()
        received = Received(self._starts, [len(source.files) for source in self._sources])
        for number, source in enumerate(self._sources):
            source.follow(partial(received.position, number))
        tracked = self._tracked if self.num_workers == 0 else None
        return Delivery(
            self._stats,
            self._reporter,
            inner,
            sources=self._sources,
            received=received,
            tracked=tracked,
            done=self._done,
        )

    def _get_iterator(self) -> Any:
        if not self._starts:
            return super()._get_iterator()
        # A view of this loader with the dataset tracked and batches sealed: what the user gave stays as it was, also
        # for frameworks that build a loader of their own from the attributes of this one.
        controls = [share(torch.tensor(start.pack())) for start in self._starts]
        done = share(torch.zeros(self._starts[0].workers + 1, dtype=torch.int64))
        tracked = Tracked(self.dataset, self._sources, controls, done)
        view = copy.copy(self)
        view.__dict__.update(
            dataset=tracked,
            generator=self.generator or _worker_seeds(self._starts),
            collate_fn=Seal(self.collate_fn, tracked),
            worker_init_fn=OnWorker(self.worker_init_fn),
        )
        self._tracked, self._controls, self._done = tracked, controls, done
        iterator = super(DataLoader, view)._get_iterator()
        # The garbage collector may come to PyTorch's iterator, which waits for its workers, before it comes to ours.
        weakref.finalize(iterator, let_workers_go, done)
        return iterator

    def _lower_workers(self) -> None:
        if not self._may_lower_workers or self._iterator is not None or len(self._sources) > 1:
            return
        self._may_lower_workers = False
        schedule, _ = self._sources[0].schedule(self.batch_size or 1, drop_last=self.drop_last)
        batches = schedule.batches(0)  # the most that any rank has, so that all ranks come to the same number
        if 1 <= batches < self.num_workers:
            _log.info("%d loader workers instead of %d: there are %d batches", batches, self.num_workers, batches)
            self.num_workers = batches


def _worker_seeds(starts: Sequence[Start]) -> torch.Generator:
    """Where the seeds of an iterator's workers come from: the program's seed and the positions it starts from."""
    where = [number for start in starts for number in (start.epoch, start.base)]
    words = np.random.SeedSequence([torch.initial_seed() & (1 << 64) - 1, *where]).generate_state(2)
    return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def _default_workers() -> int:
    """6, or the cores that each rank of this node may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = max(1, cores // max(1, int(local_ranks) if local_ranks.isdigit() else 1))
    if share < DEFAULT_WORKERS:
        _log.info(
            "%d loader workers instead of %d: that is this rank's share of %d cores", share, DEFAULT_WORKERS, cores
        )
    return min(DEFAULT_WORKERS, share)
