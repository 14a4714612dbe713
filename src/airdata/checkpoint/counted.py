"""Retries of storage requests, counted: a save that needed many is a warning that costs nothing to give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from airdata.transport import Retry

__all__ = ["CountedRetry"]

T = TypeVar("T")


class CountedRetry(Retry):
    """A :class:`Retry` that knows how often it tried again, over all threads.

    Attributes:
        count: attempts after the first. Those that a driver makes inside one attempt (botocore's) are not seen.
    """

    count: int

    def __init__(self) -> None:
        super().__init__()
        # The base is a frozen value; the counter is the one thing that changes.
        object.__setattr__(self, "count", 0)
        object.__setattr__(self, "_lock", threading.Lock())

    def call(self, what: str, verb: Callable[[], T]) -> T:
        """See :meth:`Retry.call`."""
        attempts = 0

        def counted() -> T:
            nonlocal attempts
            attempts += 1
            return verb()

        try:
            return super().call(what, counted)
        finally:
            if attempts > 1:
                with self._lock:  # type: ignore[attr-defined]
                    object.__setattr__(self, "count", self.count + attempts - 1)
