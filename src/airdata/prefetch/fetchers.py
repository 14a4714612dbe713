"""The threads of one iteration that fetch.

They are daemons and nobody joins them: a read that hangs must hang neither the end of an iteration nor that of the
interpreter. A thread is started when a place is to be fetched and none is idle, so files that are on local disk already
cost none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from airdata.cache.lease import CachedFile
from airdata.prefetch.pace import Pace
from airdata.prefetch.place import Place
from airdata.transport import FileInfo

__all__ = ["Fetchers"]


class Fetchers:
    """Fetches places in the order in which they are submitted, several at once.

    Args:
        fetch: brings one file to local disk; called in several threads.
        most: fetches that run at once, at most.

    Attributes:
        done: notified, with its lock held, when an awaited place has its result or nothing runs any more.
        ended: how many fetches have ended.
    """

    def __init__(self, fetch: Callable[[FileInfo], CachedFile], most: int) -> None:
        # Re-entrant: the garbage collector may close an iterator in a thread that holds the lock.
        lock = threading.RLock()
        self.done = threading.Condition(lock)
        self.ended = 0
        self._work = threading.Condition(lock)
        self._fetch = fetch
        self._most = most
        self._pace: Pace | None = None  # until the first file is known
        self._queue: deque[Place[Any]] = deque()
        self._handed: deque[Place[Any]] = deque()  # to threads that were woken for them
        self._running = 0
        self._idle = 0
        self._closed = False

    @property
    def running(self) -> int:
        """Fetches under way."""
        return self._running

    def submit(self, place: Place[Any]) -> None:
        """Fetch a place as soon as there is a thread for it."""
        with self._work:
            self._pace = self._pace or Pace(self._most, place.size)
            self._queue.append(place)
            self._hand_out()

    def recall(self) -> None:
        """Forget what is submitted and not begun."""
        with self._work:
            self._queue.clear()

    def give_up(self, place: Place[Any]) -> None:
        """Wait no more for a place: if a thread hangs in it, another one does its work."""
        with self._work:
            if place.running:
                place.given_up = True
                self._running -= 1
                self._hand_out()
            elif place in self._queue:
                self._queue.remove(place)

    def close(self) -> None:
        """Begin nothing more; what a fetch under way brings is released."""
        with self._work:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
            self.done.notify_all()

    def _hand_out(self) -> None:
        while self._may_begin():
            self._begin()
            if self._idle:
                self._idle -= 1
                self._work.notify()
            else:
                threading.Thread(target=self._run, name="airdata-fetch", daemon=True).start()

    def _may_begin(self) -> bool:
        limit = self._pace.limit if self._pace else 0
        return bool(self._queue) and self._running < limit and not self._closed

    def _begin(self) -> None:
        place = self._queue.popleft()
        place.running = True
        self._running += 1
        self._handed.append(place)

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._handed:
                    if self._closed:
                        return
                    self._idle += 1
                    self._work.wait()
                place = self._handed.popleft()
            result: CachedFile | Exception
            try:
                result = self._fetch(place.file)
            except Exception as error:  # noqa: BLE001 - it travels with its item, and the consumer decides
                result = error
            with self._work:
                kept = self._settle(place, result)
                gone = place.given_up  # another thread was started in this one's stead
                if not gone and self._may_begin():
                    self._begin()  # by itself: waking another thread costs more than a small file
                self._hand_out()
            if not kept and isinstance(result, CachedFile):
                result.release()
            if gone:
                return
            del place, result  # not kept alive while this thread waits

    def _settle(self, place: Place[Any], result: CachedFile | Exception) -> bool:
        """Note how a fetch ended; whether its result is kept."""
        self.ended += 1
        place.running = False
        if place.given_up:
            return False
        self._running -= 1
        assert self._pace is not None
        self._pace.finished(place.size, time.monotonic(), more=bool(self._queue))
        if self._closed:
            return False
        place.result = result
        if place.awaited or not self._running:
            self.done.notify_all()
        return True
