"""Bounded background fetching that follows the order.

    plan ──► threads take the next item while files and bytes in flight stay under their limits
                 └─► fetch(file) ──► its place in the line ──► the consumer, in the order of the plan

Threads start when iteration starts, in the process that iterates, so a :class:`Prefetcher` may be made before a fork.
The line itself is in ``airdata.prefetch.line``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from airdata.cache.lease import CachedFile
from airdata.metrics import Counters
from airdata.prefetch.line import Line
from airdata.prefetch.place import LineLimits
from airdata.transport import FileInfo

__all__ = ["Prefetcher"]

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Fetches the files of a plan ahead of its consumer.

    Args:
        plan: pairs of whatever the consumer wants back, and a file. Read lazily, by several threads but one at a time.
        fetch: brings one file to local disk; called in several threads.
        max_files: files fetched, or being fetched, and not delivered yet.
        max_bytes: their bytes; a single larger file passes alone.
        timeout: seconds without progress after which the file the consumer waits for is given up. Progress is any file
            of this plan that grows on disk or ends.
        counters: what is delivered is counted here, in the consumer's thread.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        plan: Iterable[tuple[T, FileInfo]],
        fetch: Callable[[FileInfo], CachedFile],
        *,
        max_files: int,
        max_bytes: int,
        timeout: float,
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self._plan = plan
        self._fetch = fetch
        self._limits = LineLimits(max_files, max_bytes, timeout)
        self._lines: weakref.WeakSet[Line[T]] = weakref.WeakSet()

    def __iter__(self) -> Iterator[tuple[T, FileInfo, CachedFile | Exception]]:
        """Items in the order of the plan, each with its lease (the consumer releases it) or its error.

        An error of the plan itself is raised at its place. A file given up by the watchdog comes with a
        :class:`airdata.errors.StalledError` that names it.
        """
        line = Line(iter(self._plan), self._fetch, self._limits, self.counters)
        self._lines.add(line)
        try:
            yield from line.deliver()
        finally:
            line.close()

    def close(self) -> None:
        """Stop at once. What was fetched and not delivered is released; a fetch under way is released when it ends."""
        for line in list(self._lines):
            line.close()
