"""How the position of the source travels with each batch, from the worker that made it to the training loop.

    worker:  source ──► the user's wrapper ──► Tracked ──► collate_fn ──► Seal ──► Parcel(batch, report, counters)
                                                                                       │ queue, pin_memory
    loop:    batch ◄── loader opens the parcel, and only then counts it as received ◄──┘

A parcel is a named tuple, which PyTorch's pinning thread walks through like any other.
"""

from __future__ import annotations

import multiprocessing.util
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from airdata.metrics import Counters, Reporter
from airdata.state import Place, Received, Report, Start

if TYPE_CHECKING:
    from airdata.dataset import UCVolumeDataset

__all__ = ["Delivery", "LoaderStats", "OnWorker", "Parcel", "Seal", "Tracked"]


class Parcel(NamedTuple):
    """A batch on its way to the training loop.

    Attributes:
        batch: what the user's ``collate_fn`` returned.
        report: where the source of its worker stood.
        counters: what the worker has counted since its last parcel.
    """

    batch: Any
    report: Report
    counters: Counters


class Tracked(IterableDataset[Any]):
    """The user's dataset, watched: it knows which of its source's files have been turned into samples.

    Args:
        dataset: the user's; the source itself, or a wrapper around it.
        source: the files.
        control: a packed :class:`Start`, in memory shared with the loader, so that it reaches persistent workers.
        done: how many batches of each role the loop is done with, and whether it has closed the iteration; shared too.
    """

    def __init__(self, dataset: Any, source: UCVolumeDataset, control: torch.Tensor, done: torch.Tensor) -> None:
        self.dataset = dataset
        self._source = source
        self._control = control
        self._shared_done = done
        self._batches = 0
        self._role = 0
        self._items: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        self._place = Place(0)
        self._made = 0  # samples made since the source was last asked
        self._sent = Counters()

    def __iter__(self) -> Iterator[Any]:
        self.close()  # a persistent worker may not have finished the last epoch
        start = Start.unpack(self._control.tolist())
        info = get_worker_info()
        self._role = start.role(0 if info is None else info.id)
        self._source.begin(start, self._role, self)
        self._place, self._made = start.places[self._role], 0
        self._sent, self._batches = self._source.counters.copy(), 0
        self._items = iter(self.dataset)
        for _ in range(self._place.drop):
            next(self._items, None)
        if self._place.drop:
            self._made = self._place.drop
            self._place = self._source.place
        return self

    def close(self) -> None:
        """Stop reading ahead."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        self._items = iter(())
        self._ahead.clear()
        self._source.end(self)

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else self._make()
        if isinstance(item, _Raised):
            raise item.error
        self._place, self._made = item.place, item.made
        return item.value

    def _make(self) -> _Made | _Raised:
        before = self._source.place
        made = self._made
        try:
            value = next(self._items)
        except Exception as error:  # noqa: BLE001 - kept for the call that is due to see it
            return _Raised(error)
        after = self._source.place
        return _Made(value, after, made + 1 if after == before else 1)

    def report(self) -> Report:
        """Where the source stands now that a batch is complete.

        Only when a wrapper asks for its next file is it known to be done with the last one, so the sample after the
        batch is made first. If it came out of a file that the batch holds samples of, that file must be read again to
        resume.
        """
        place = self._place
        self._batches += 1
        if self.dataset is not self._source:
            if not self._ahead:
                self._ahead.append(self._make())
            following = self._ahead[0]
            if isinstance(following, _Made) and following.place == place and place.passed:
                place = Place(place.epoch, place.passed - 1, self._made)
        return Report(self._role, place)

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

    def count(self) -> Counters:
        """What was counted since the last call."""
        now = self._source.counters.copy()
        since, self._sent = now.minus(self._sent), now
        return since


class _Made(NamedTuple):
    value: Any
    place: Place
    made: int


class _Raised(NamedTuple):
    error: Exception


def let_workers_go(done: torch.Tensor) -> None:
    """Nobody will read what workers have made."""
    done[_CLOSED] = 1


_CLOSED = -1
_LINGER_PAUSE = 0.02


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


@dataclass
class LoaderStats:
    """What a loader has done so far.

    Attributes:
        batches: handed to the training loop.
        fetch_seconds: the loop waited for them, in all.
        loop_seconds: the loop took between them, in all.
        files: what the workers counted.
    """

    batches: int = 0
    fetch_seconds: float = 0.0
    loop_seconds: float = 0.0
    files: Counters = field(default_factory=Counters)

    @property
    def waiting_share(self) -> float:
        """The part of the time that the loop waited for data, 0 to 1: the number to bring down."""
        total = self.fetch_seconds + self.loop_seconds
        return self.fetch_seconds / total if total else 0.0

    def __repr__(self) -> str:
        return (
            f"LoaderStats({self.batches} batches, waited {self.fetch_seconds:.2f} s ({self.waiting_share:.0%} of the "
            f"time), {self.files!r})"
        )


class Delivery(Iterator[Any]):
    """One iteration of a loader, as the training loop sees it."""

    def __init__(
        self,
        stats: LoaderStats,
        reporter: Reporter,
        inner: Iterator[Any],
        *,
        source: UCVolumeDataset | None = None,
        received: Received | None = None,
        tracked: Tracked | None = None,
        done: torch.Tensor | None = None,
    ) -> None:
        self._stats = stats
        self._reporter = reporter
        self._inner: Iterator[Any] | None = inner
        self._source = source
        self._received = received
        self._tracked = tracked  # when it is read in this process, which then counts for itself
        self._done = done
        self._counters = Counters()
        self._handed = 0.0

    def __next__(self) -> Any:
        if self._inner is None:
            raise StopIteration
        asked = time.perf_counter()
        if self._done is not None and self._received is not None and self._received.last >= 0:
            self._done[self._received.last] = self._received.batches[self._received.last]
        if self._handed:
            self._stats.loop_seconds += asked - self._handed
        try:
            parcel = next(self._inner)
        except StopIteration:
            if self._source is not None and self._received is not None:
                self._source.finished(self._received.start.epoch)
            self.close()
            raise
        except BaseException:
            if self._done is not None:
                let_workers_go(self._done)
            raise
        self._handed = time.perf_counter()
        self._stats.batches += 1
        self._stats.fetch_seconds += self._handed - asked
        self._reporter.put("fetch_seconds", self._handed - asked)
        self._reporter.put("waiting_share", self._stats.waiting_share)
        return self._open(parcel) if isinstance(parcel, Parcel) else parcel

    def _open(self, parcel: Parcel) -> Any:
        assert self._source is not None
        assert self._received is not None
        if self._tracked is None:
            self._source.counters.add(parcel.counters)
        self._counters.add(parcel.counters)
        self._source.check_bad_files(self._counters.bad_files)
        self._received.add(parcel.report)
        return parcel.batch

    def close(self) -> None:
        """Stop reading ahead. A loader can be iterated again at once."""
        if self._done is not None:
            let_workers_go(self._done)
        self._inner = self._done = None
        tracked, self._tracked = self._tracked, None
        if tracked is not None and self._source is not None:
            tracked.close()

    def __del__(self) -> None:
        self.close()
