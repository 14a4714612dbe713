"""Which downloads of this process are under way, and how far they are.

A fetch notes the file it writes to; the watchdog of the prefetcher looks at its size. So progress is bytes on disk, for
every transport alike, and costs a fetch two dictionary updates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from airdata.transport import FileInfo

__all__ = ["Progress", "bytes_on_disk", "in_transit"]

# By path alone: the size may not have been known when the download was planned.
_parts: dict[str, str] = {}  # each update is one bytecode, so threads need no lock


@contextmanager
def in_transit(file: FileInfo, part: str) -> Iterator[None]:
    """While this context lasts, ``file`` is being written to the local path ``part``, by this process or another."""
    _parts[file.path] = part
    try:
        yield
    finally:
        _parts.pop(file.path, None)


def bytes_on_disk(file: FileInfo) -> int:
    """How much of a download has arrived; 0 when none is under way."""
    part = _parts.get(file.path)
    if part is None:
        return 0
    try:
        return os.stat(part).st_size
    except OSError:
        return 0


class Progress:
    """Tells slow from stuck.

    Args:
        timeout: seconds without a change after which the downloads count as stuck.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._sizes: tuple[int, ...] = ()
        self._since = time.monotonic()

    def moved(self) -> None:
        """Something happened: the clock starts again."""
        self._since = time.monotonic()

    def stalled(self, files: Iterable[FileInfo]) -> bool:
        """Whether nothing happened for the time-out, nor does any of these downloads have another size than before."""
        sizes = tuple(map(bytes_on_disk, files))
        if sizes != self._sizes:
            self._sizes = sizes
            self.moved()
        return time.monotonic() - self._since >= self._timeout
