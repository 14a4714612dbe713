"""The line of one iteration: places in the order of the plan, threads that fill them, a consumer that takes the first.

Threads are daemons and nobody joins them: a read that hangs must hang neither the end of an iteration nor that of the
interpreter. Their number follows the store: one on a warm cache, doubled each time the consumer waits in vain, up to
one for each file in flight.

When the disk is too full for what is in flight, what was fetched ahead is given back and files go one at a time for a
while: a full disk slows training and does not stop it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from airdata.cache.lease import CachedFile
from airdata.cache.transit import Progress, bytes_on_disk
from airdata.errors import StalledError
from airdata.metrics import Counters
from airdata.prefetch.place import LineLimits, Place, is_disk_full
from airdata.transport import FileInfo

__all__ = ["Line"]

T = TypeVar("T")

# How long the consumer waits for the head of the line before it adds threads: above the 0.1 ms of a cache hit, below
# the first byte of any network.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 1.0
# Files that go one at a time after the disk was full, before it is tried again with many.
_ONE_AT_A_TIME = 32


class Line(Generic[T]):
    """The state of one iteration, shared by its consumer and its threads. See :class:`airdata.prefetch.Prefetcher`."""

    def __init__(
        self,
        plan: Iterator[tuple[T, FileInfo]],
        fetch: Callable[[FileInfo], CachedFile],
        limits: LineLimits,
        counters: Counters,
    ) -> None:
        self._plan = plan
        self._fetch = fetch
        self._limits = limits
        self._counters = counters
        self._pid = os.getpid()
        # Re-entrant: the garbage collector may close an iterator in a thread that is just taking an item.
        lock = threading.RLock()
        self._ready = threading.Condition(lock)  # the consumer waits here for the head of the line
        self._room = threading.Condition(lock)  # threads wait here for something to do
        self._places: deque[Place[T]] = deque()
        self._next: Place[T] | None = None
        self._bytes = 0
        self._threads = 0
        self._running = 0
        self._given_up = 0
        self._waiting = 0
        self._singly = 0  # so many files are still to go one at a time
        self._ended = False
        self._closed = False
        self._plan_error: BaseException | None = None
        self._progress = Progress(limits.timeout)
        self._consumer_waits = False

    # --- the consumer's side ---

    def deliver(self) -> Iterator[tuple[T, FileInfo, CachedFile | Exception]]:
        """Items in the order of the plan, each with its lease or error."""
        while True:
            if os.getpid() != self._pid:
                raise RuntimeError("this iterator was started in another process; start a new one after the fork")
            start = time.perf_counter()
            with self._ready:
                self._consumer_waits = True
                place = self._head()
                self._consumer_waits = False
            self._counters.wait_seconds += time.perf_counter() - start
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
        with self._ready:
            self._closed = True
            left = [place.result for place in self._places]
            self._places.clear()
            self._next = None
            self._ready.notify_all()
            self._room.notify_all()
        for result in left:
            if isinstance(result, CachedFile):
                result.release()

    def _head(self) -> Place[T] | None:
        """Wait for the head of the line and take it off; None at the end of the plan."""
        if not self._threads:
            self._start_threads(1)
        pause = _FIRST_PAUSE
        self._progress.moved()
        while not self._closed:
            if self._places and self._places[0].result is not None:
                if not (is_disk_full(self._places[0].result) and self._give_back()):
                    return self._take_off()
            elif self._ended and not self._places:
                if self._plan_error is not None:
                    raise self._plan_error
                return None
            elif not self._ready.wait(pause):
                # Fetches take long, or we would not wait: double the threads. On a warm cache one is enough, and more
                # would only take the interpreter from the training loop.
                self._start_threads(self._threads)
                pause = min(2 * pause, self._limits.timeout / 4, _LONGEST_PAUSE)
                self._watch()
        return None

    def _take_off(self) -> Place[T]:
        place = self._places.popleft()
        self._bytes -= place.size
        self._singly = max(0, self._singly - 1)
        # Threads are woken for a quarter of the line at a time: a switch of threads costs as much as a hit.
        if self._waiting or len(self._places) <= self._limits.files * 3 // 4:
            self._room.notify_all()
        return place

    def _watch(self) -> None:
        """Give up the head of the line when nothing has moved for the time-out."""
        stalled = self._progress.stalled(place.file for place in self._places if place.result is None)
        if not stalled or not self._places or self._places[0].result is not None:
            return
        head = self._places[0]
        head.result = StalledError(
            f"{head.file.path}: no byte moved for {self._limits.timeout:g} s ({bytes_on_disk(head.file)} of "
            f"{head.file.size} bytes are here). The source or the network hangs, or the time-out is too short for it."
        )
        self._progress.moved()
        if head.waiting:
            head.waiting = False
            self._waiting -= 1
        else:
            head.given_up = True
            self._given_up += 1
            self._running -= 1
            self._start_threads(1)

    def _give_back(self) -> bool:
        """The disk was full for the head: free what is held for later places, to try it again alone.

        False when it was alone: the consumer had come back for it, so had released what it would, and nothing was held.
        """
        if self._places[0].alone:
            return False
        held = [place for place in self._places if isinstance(place.result, CachedFile)]
        self._singly = _ONE_AT_A_TIME
        for place in held:
            assert isinstance(place.result, CachedFile)
            place.result.release()
        for place in self._places:
            if place in held or is_disk_full(place.result):
                self._wait_again(place)
        self._room.notify_all()
        self._start_threads(1)
        return True

    def _wait_again(self, place: Place[T]) -> None:
        place.result, place.waiting = None, True
        self._waiting += 1

    # --- the threads' side ---

    def _start_threads(self, count: int) -> None:
        for _ in range(min(count, self._limits.files + self._given_up - self._threads)):
            self._peek()
            if self._closed or not (self._waiting or self._fits()):
                return
            self._threads += 1
            threading.Thread(target=self._work, name=f"airdata-fetch-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._room:
                place = self._take()
                if place is None:
                    self._threads -= 1
                    return
            result: CachedFile | Exception
            try:
                result = self._fetch(place.file)
            except Exception as error:  # noqa: BLE001 - it travels with its item, and the consumer decides
                result = error
            with self._ready:
                kept = self._settle(place, result)
            if not kept and isinstance(result, CachedFile):
                result.release()
            if place.given_up:
                return  # another thread was started in this one's stead
            del place, result  # not kept alive while this thread waits

    def _settle(self, place: Place[T], result: CachedFile | Exception) -> bool:
        """Note how a fetch ended; whether its result is kept."""
        self._progress.moved()
        if self._closed or place.given_up:
            return False
        self._running -= 1
        if self._singly:
            self._room.notify_all()
            if place is not self._places[0]:
                self._wait_again(place)
                return False
        place.result = result
        if place is self._places[0]:
            self._ready.notify()
        return True

    def _take(self) -> Place[T] | None:
        """Wait for something to fetch; None when there is nothing left."""
        while not self._closed:
            self._peek()
            place = self._pick()
            if place is not None:
                self._running += 1
                return place
            if self._next is None and not self._waiting and not self._singly:
                return None
            if self._ended and not self._places:
                return None
            self._room.wait()
        return None

    def _pick(self) -> Place[T] | None:
        """The place to fetch for now: one that waits, else a new one at the end of the line if the limits allow."""
        if self._singly and (self._running or (self._places and not self._places[0].waiting)):
            return None
        if self._waiting:
            place = next(place for place in self._places if place.waiting)
            place.waiting = False
            place.alone = self._singly > 0 and self._consumer_waits
            self._waiting -= 1
            return place
        if not self._fits():
            return None
        new, self._next = self._next, None
        assert new is not None
        self._places.append(new)
        self._bytes += new.size
        return new

    def _fits(self) -> bool:
        if self._next is None or len(self._places) >= self._limits.files:
            return False
        return not self._places or self._bytes + self._next.size <= self._limits.bytes

    def _peek(self) -> None:
        """Read the plan's next item, unless one is waiting already."""
        if self._next is not None or self._ended:
            return
        try:
            self._next = Place(*next(self._plan))
        except BaseException as error:  # noqa: BLE001 - raised in the consumer, at its place in the order
            self._plan_error = None if isinstance(error, StopIteration) else error
            self._ended = True
            self._ready.notify()
            self._room.notify_all()
