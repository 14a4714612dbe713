"""A second request for a small object whose first is slow; whichever answers first wins.

Stores now and then take a hundred times their usual time for one request out of a thousand; a second one is hardly
ever as slow ("The Tail at Scale", Dean and Barroso, CACM 2013). Off unless asked for, since it adds requests.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["HEDGED_BYTES", "Hedge"]

T = TypeVar("T")

# A larger object is slow because it is large.
HEDGED_BYTES = 8 << 20
_REMEMBERED = 100
_SECOND_REQUESTS = 4


class Hedge(Generic[T]):
    """Runs reads, with a second request for those that take longer than most.

    Args:
        seconds: the least time a first request gets before there is a second.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._pid = os.getpid()
        # A store that is slow for all must not get twice the requests.
        self._permits = threading.Semaphore(_SECOND_REQUESTS)

    def __reduce__(self) -> tuple[type[Hedge[T]], tuple[float]]:
        return type(self), (self._seconds,)

    def first(self, read: Callable[[], T]) -> T:
        """The answer of the first of two reads to succeed; the failure of the last when both fail."""
        if os.getpid() != self._pid:  # what threads of the forking process held stays held
            self.__init__(self._seconds)  # type: ignore[misc]
        answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        start = time.monotonic()
        self._start(read, answers, holds_permit=False)
        running = 1
        try:
            answer, error = answers.get(timeout=self.patience())
        except queue.Empty:
            if self._permits.acquire(blocking=False):
                self._start(read, answers, holds_permit=True)
                running += 1
            answer, error = answers.get()
        if error is not None and running > 1:
            answer, error = answers.get()
        if error is not None:
            raise error
        self._recent.append(time.monotonic() - start)
        return answer  # type: ignore[return-value]

    def patience(self) -> float:
        """Seconds until a second request: as long as 95 of 100 recent reads took, and never less than asked for."""
        recent = sorted(self._recent.copy())
        return max(self._seconds, recent[int(0.95 * len(recent))] if recent else 0.0)

    def _start(
        self,
        read: Callable[[], T],
        answers: queue.SimpleQueue[tuple[T | None, BaseException | None]],
        *,
        holds_permit: bool,
    ) -> None:
        permits = self._permits

        def run() -> None:
            try:
                answers.put((read(), None))
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                answers.put((None, error))
            finally:
                if holds_permit:
                    permits.release()

        threading.Thread(target=run, name="airdata-hedge", daemon=True).start()
