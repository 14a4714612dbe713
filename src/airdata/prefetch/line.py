"""The line of one iteration: places in the order of the plan, filled ahead of the consumer, who takes the first.

    plan ──► on local disk already? ──► yes: its place has its result at once
                                    └─► no:  submitted to the fetchers, whose threads fill the place

The consumer itself moves the plan on, each time it takes a place: so a warm epoch needs no thread and no lock, and the
line is as long when the consumer leaves with a sample as limits allow.

When the disk is too full for what is in flight, what was fetched ahead is given back and files go one at a time for a
while: a full disk slows training and does not stop it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from airdata.cache.lease import CachedFile
from airdata.cache.transit import Progress, bytes_on_disk
from airdata.errors import StalledError
from airdata.metrics import Counters
from airdata.prefetch.fetchers import Fetchers
from airdata.prefetch.place import LineLimits, Place, is_disk_full
from airdata.transport import FileInfo

__all__ = ["Line"]

T = TypeVar("T")

_LONGEST_PAUSE = 1.0
# Files that go one at a time after the disk was full, before it is tried again with many.
_ONE_AT_A_TIME = 32


class Line(Generic[T]):
    """The state of one iteration. See :class:`airdata.prefetch.Prefetcher`."""

    def __init__(
        self,
        plan: Iterator[tuple[T, FileInfo]],
        fetch: Callable[[FileInfo], CachedFile],
        find: Callable[[FileInfo], CachedFile | None],
        limits: LineLimits,
        counters: Counters,
    ) -> None:
        self._plan = plan
        self._find = find
        self._limits = limits
        self._counters = counters
        self._pid = os.getpid()
        self._fetchers = Fetchers(fetch, limits.files)
        # Only the consumer adds; it and whoever closes the line remove, each place once.
        self._places: deque[Place[T]] = deque()
        self._bytes = 0
        self._next: tuple[T, FileInfo] | None = None  # read from the plan, and not in the line yet
        self._ended = False
        self._plan_error: BaseException | None = None
        self._closed = False
        self._singly = 0  # so many files are still to go one at a time
        self._progress = Progress(limits.timeout)
        self._fetches_seen = 0

    def deliver(self) -> Iterator[tuple[T, FileInfo, CachedFile | Exception]]:
        """Items in the order of the plan, each with its lease or error."""
        self._move_on()
        while True:
            if os.getpid() != self._pid:
                raise RuntimeError("this iterator was started in another process; start a new one after the fork")
            place = self._take_off()
            if place is None:
                return
            result = place.result
            assert result is not None
            if isinstance(result, CachedFile):
                self._counters.count_file(result.size, hit=result.hit)
            else:
                self._counters.bad_files += 1
            yield place.item, place.file, result
            del place, result  # the lease is the consumer's alone

    def close(self) -> None:
        """Stop at once. What was fetched and not delivered is released; a fetch under way is released when it ends."""
        if os.getpid() != self._pid:
            return  # a forked copy: threads and leases are the parent's, and the lock may be held for ever
        self._closed = True
        self._fetchers.close()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                result = self._places.popleft().result
                if isinstance(result, CachedFile):
                    result.release()

    # --- the end of the line ---

    def _move_on(self) -> None:
        """Read the plan on as far as the limits allow."""
        places, limits = self._places, self._limits
        while len(places) < limits.places and not self._closed and not (self._singly and places):
            if self._next is None and not self._read_plan():
                return
            assert self._next is not None
            item, file = self._next
            size = max(0, file.size)
            if places and self._bytes + size > limits.bytes:
                return
            self._next = None
            place = Place(item, file, self._find(file))
            self._bytes += size
            places.append(place)
            if place.result is None and not self._singly:
                self._fetchers.submit(place)

    def _read_plan(self) -> bool:
        if self._ended:
            return False
        try:
            self._next = next(self._plan)
        except BaseException as error:  # noqa: BLE001 - raised at its place in the order
            self._plan_error = None if isinstance(error, StopIteration) else error
            self._ended = True
        return self._next is not None

    # --- its head ---

    def _take_off(self) -> Place[T] | None:
        """Wait for the head of the line and take it off; None at the end of the plan, or when the line was closed."""
        while (head := self._head()) is not None:
            if head.result is None:
                self._wait(head)
            elif not isinstance(head.result, CachedFile) and is_disk_full(head.result) and not head.alone:
                self._give_back(head)
            elif self._leave():
                self._bytes -= head.size
                if self._singly:
                    self._singly -= 1
                    if not self._singly:
                        self._submit_all()
                self._move_on()
                return head
        if self._closed:
            self._drain()  # whoever closed the line may have come before the last place did
        elif self._plan_error is not None:
            raise self._plan_error
        return None

    def _head(self) -> Place[T] | None:
        try:
            return self._places[0]
        except IndexError:
            return None

    def _leave(self) -> bool:
        """Take the head off, unless whoever closed the line was quicker."""
        try:
            self._places.popleft()
        except IndexError:
            return False
        return True

    def _wait(self, head: Place[T]) -> None:
        start = time.perf_counter()
        self._progress.moved()
        done = self._fetchers.done
        with done:
            head.awaited = True
            while head.result is None and not self._closed:
                if self._singly and not self._fetchers.running:
                    self._fetch_alone(head)
                if not done.wait(min(self._limits.timeout / 4, _LONGEST_PAUSE)):
                    self._watch(head)
        self._counters.wait_seconds += time.perf_counter() - start

    def _watch(self, head: Place[T]) -> None:
        """Give up the head of the line when nothing has moved for the time-out."""
        if self._fetches_seen != self._fetchers.ended:
            self._fetches_seen = self._fetchers.ended
            self._progress.moved()
        if head.result is not None or not self._progress.stalled(p.file for p in self._unfilled()):
            return
        head.result = StalledError(
            f"{head.file.path}: no byte moved for {self._limits.timeout:g} s ({bytes_on_disk(head.file)} of "
            f"{head.file.size} bytes are here). The source or the network hangs, or the time-out is too short for it."
        )
        self._fetchers.give_up(head)

    def _unfilled(self) -> list[Place[T]]:
        return [place for place in list(self._places) if place.result is None]

    # --- a full disk ---

    def _give_back(self, head: Place[T]) -> None:
        """The disk was full for the head: free what is held for later places, and go one at a time for a while."""
        self._fetchers.recall()
        self._singly = _ONE_AT_A_TIME
        head.result = None

    def _fetch_alone(self, head: Place[T]) -> None:
        """With the lock held, and nothing running: the consumer is here, so has released what it would."""
        for place in list(self._places):
            held = place.result
            if isinstance(held, CachedFile):
                held.release()
            if isinstance(held, CachedFile) or is_disk_full(held):
                place.result = None
        head.alone = True
        self._fetchers.submit(head)

    def _submit_all(self) -> None:
        for place in self._unfilled():
            self._fetchers.submit(place)
