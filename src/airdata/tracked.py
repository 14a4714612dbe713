"""The worker's side of a loader: it watches the user's dataset, and says with each batch where its sources stand.

    sources ──► the user's wrapper ──► Tracked ──► collate_fn ──► Seal ──► Parcel(batch, report, counters)

A parcel is a named tuple, which PyTorch's pinning thread walks through like any other.
"""

from __future__ import annotations

import multiprocessing.util
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from airdata.metrics import Counters
from airdata.state import Place, Report, Start

if TYPE_CHECKING:
    from airdata.source import Source

__all__ = ["OnWorker", "Parcel", "Seal", "Tracked", "let_workers_go"]

_CLOSED = -1
_LINGER_PAUSE = 0.02


class Parcel(NamedTuple):
    """A batch on its way to the training loop.

    Attributes:
        batch: what the user's ``collate_fn`` returned.
        report: where the sources of its worker stood.
        counters: what the worker has counted of each source since its last parcel.
    """

    batch: Any
    report: Report
    counters: Sequence[Counters]


class Tracked(IterableDataset[Any]):
    """The user's dataset, watched: it knows which of its sources' files have been turned into samples.

    A run is what the dataset makes in a row without asking a source for more: the samples of one file, if it makes
    several of it. Where a run begins, a dataset that was just made would do the same, so that is what it resumes from.

    Args:
        dataset: the user's; a source itself, or a wrapper around some.
        sources: the files.
        controls: a packed :class:`Start` of each source, in memory shared with the loader, so that they reach
            persistent workers.
        done: how many batches of each role the loop is done with, and whether it has closed the iteration; shared too.
    """

    def __init__(
        self, dataset: Any, sources: Sequence[Source], controls: Sequence[torch.Tensor], done: torch.Tensor
    ) -> None:
        self.dataset = dataset
        self._sources = tuple(sources)
        self._controls = tuple(controls)
        self._shared_done = done
        self._batches = 0
        self._role = 0
        self._items: Iterator[Any] = iter(())
        self._ahead: deque[_Made | _Raised] = deque()
        self._last = _Made(None, (), (), 0)
        self._sent: list[Counters] = []

    def __iter__(self) -> Iterator[Any]:
        self.close()  # a persistent worker may not have finished the last epoch
        starts = [Start.unpack(control.tolist()) for control in self._controls]
        info = get_worker_info()
        self._role = starts[0].role(0 if info is None else info.id)
        for source, start in zip(self._sources, starts, strict=True):
            source.begin(start, self._role, self)
        self._batches, self._sent = 0, [source.counters.copy() for source in self._sources]
        self._items = iter(self.dataset)
        begin = self._places()
        drop = max(start.places[self._role].drop for start in starts)
        for _ in range(drop):
            next(self._items, None)
        self._last = _Made(None, self._places(), begin, drop)
        return self

    def _places(self) -> tuple[Place, ...]:
        return tuple([source.place for source in self._sources])

    def close(self) -> None:
        """Stop reading ahead."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        self._items = iter(())
        self._ahead.clear()
        for source in self._sources:
            source.end(self)

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else self._make()
        if isinstance(item, _Raised):
            raise item.error
        self._last = item
        return item.value

    def _make(self) -> _Made | _Raised:
        last = self._last
        try:
            value = next(self._items)
        except Exception as error:  # noqa: BLE001 - kept for the call that is due to see it
            return _Raised(error)
        places = self._places()
        if places == last.places:
            return _Made(value, places, last.run, last.made + 1)
        return _Made(value, places, last.places, 1)

    def report(self) -> Report:
        """Where the sources stand now that a batch is complete.

        Only when a wrapper asks for its next file is it known to be done with the last one, so the sample after the
        batch is made first. If it belongs to a run that the batch holds samples of, that must be read again to resume.
        """
        self._batches += 1
        last = self._last
        if any(self.dataset is source for source in self._sources):
            return Report(self._role, last.places)
        if not self._ahead:
            self._ahead.append(self._make())
        following = self._ahead[0]
        if isinstance(following, _Made) and following.run == last.run:
            return Report(self._role, tuple(place._replace(drop=last.made) for place in last.run))
        return Report(self._role, last.places)

    def linger(self) -> None:
        """Keep this worker's process, and with it its leases, until the loop is done with its batches.

        PyTorch ends a worker as soon as it has heard that there is nothing more to read, which may be several batches
        before the loop comes to the last ones.
        """
        parent = os.getppid()
        while not self._shared_done[_CLOSED] and self._shared_done[self._role] < self._batches:
            if os.getppid() != parent:
                return
            time.sleep(_LINGER_PAUSE)

    def count(self) -> list[Counters]:
        """What was counted of each source since the last call."""
        now = [source.counters.copy() for source in self._sources]
        since = [new.minus(old) for new, old in zip(now, self._sent, strict=True)]
        self._sent = now
        return since


class _Made(NamedTuple):
    """A sample of a wrapper: where its sources stood after it and before its run, and the samples of that so far."""

    value: Any
    places: tuple[Place, ...]
    run: tuple[Place, ...]
    made: int


class _Raised(NamedTuple):
    error: Exception


class Seal:
    """A ``collate_fn`` that puts what the user's returns into a parcel."""

    def __init__(self, collate: Callable[[Any], Any], tracked: Tracked) -> None:
        self._collate = collate
        self._tracked = tracked

    def __call__(self, samples: Any) -> Parcel:
        """Collate, then look where the source stands."""
        batch = self._collate(samples)
        return Parcel(batch, self._tracked.report(), self._tracked.count())


class OnWorker:
    """A ``worker_init_fn`` that shows the user's own dataset in ``get_worker_info()``, then calls the user's."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        """Prepare the worker of this number."""
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Tracked):
            # Before the finalizers that remove what a process has for itself: those have priority 0.
            multiprocessing.util.Finalize(None, info.dataset.linger, exitpriority=100)
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._function is not None:
            self._function(worker)


def let_workers_go(done: torch.Tensor) -> None:
    """Nobody will read what workers have made."""
    done[_CLOSED] = 1
