"""Bounded background fetching that follows the order.

    plan ──► line: as many files and bytes ahead of the consumer as the limits allow, handed over in the plan's order
                 ├─► find(file): on local disk already, no thread needed
                 └─► fetchers: threads call fetch(file), as many at once as the measured throughput says (pace)

Threads start when iteration starts, in the process that iterates, so a :class:`Prefetcher` may be made before a fork.
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
        plan: pairs of whatever the consumer wants back, and a file. Read lazily, in the consumer's thread.
        fetch: brings one file to local disk; called in several threads.
        find: returns a file that is on local disk already, or None, at once; called in the consumer's thread.
        max_files: files being fetched at once. Four times as many may be under way or have arrived, and not be
            delivered yet.
        max_bytes: the bytes of the latter; a single larger file passes alone.
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
        find: Callable[[FileInfo], CachedFile | None] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self._plan = plan
        self._fetch = fetch
        self._find = find or _nothing_is_here
        self._limits = LineLimits(max_files, max_bytes, timeout)
        self._lines: weakref.WeakSet[Line[T]] = weakref.WeakSet()

    def __iter__(self) -> Iterator[tuple[T, FileInfo, CachedFile | Exception]]:
        """Items in the order of the plan, each with its lease (the consumer releases it) or its error.

        An error of the plan itself is raised at its place. A file given up by the watchdog comes with a
        :class:`airdata.errors.StalledError` that names it.
        """
        line = Line(iter(self._plan), self._fetch, self._find, self._limits, self.counters)
        self._lines.add(line)
        try:
            yield from line.deliver()
        finally:
            line.close()

    def close(self) -> None:
        """Stop at once. What was fetched and not delivered is released; a fetch under way is released when it ends."""
        for line in list(self._lines):
            line.close()


def _nothing_is_here(file: FileInfo) -> None:
    """For sources of which nothing can be known without a fetch."""
