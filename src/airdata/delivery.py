"""The training loop's side of a loader: batches on arrival.

    Parcel ──► opened: what its sources read is counted, their places are received ──► the batch

Only what the loop has been handed counts; what workers have made ahead does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from airdata.metrics import Counters, Reporter
from airdata.received import Received
from airdata.tracked import Parcel, Tracked, let_workers_go

if TYPE_CHECKING:
    from airdata.source import Source

__all__ = ["Delivery", "LoaderStats"]


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
        sources: Sequence[Source] = (),
        received: Received | None = None,
        tracked: Tracked | None = None,
        done: torch.Tensor | None = None,
    ) -> None:
        self._stats = stats
        self._reporter = reporter
        self._inner: Iterator[Any] | None = inner
        self._sources = tuple(sources)
        self._received = received
        self._tracked = tracked  # when it is read in this process, which then counts for itself
        self._done = done
        self._counters = [Counters() for _ in self._sources]
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
            if self._received is not None:
                for source, start in zip(self._sources, self._received.starts, strict=True):
                    source.finished(start.epoch)
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
        assert self._received is not None
        for source, total, counted in zip(self._sources, self._counters, parcel.counters, strict=True):
            if self._tracked is None:
                source.counters.add(counted)
            total.add(counted)
            source.check_bad_files(total.bad_files)
        self._received.add(parcel.report)
        return parcel.batch

    def close(self) -> None:
        """Stop reading ahead. A loader can be iterated again at once."""
        if self._done is not None:
            let_workers_go(self._done)
        self._inner = self._done = None
        tracked, self._tracked = self._tracked, None
        if tracked is not None:
            tracked.close()

    def __del__(self) -> None:
        self.close()
