"""A place in the line of files to come, and what a line may hold."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Generic, TypeVar

from airdata.cache.lease import CachedFile
from airdata.transport import FileInfo

__all__ = ["LineLimits", "Place", "is_disk_full"]

T = TypeVar("T")

# Files are handed over in order, so a late one keeps those behind it in line, as do hits: with no more places than
# fetches, 4 of 10 threads were seen idle while one was waited for.
_PLACES_PER_FETCH = 4


@dataclass(frozen=True)
class LineLimits:
    """Of one line.

    Attributes:
        files: being fetched at once.
        bytes: of the files that are being fetched or have arrived, and are not delivered; a single larger file passes
            alone.
        timeout: seconds without progress after which the head is given up.

    Raises:
        ValueError: one of them is not positive.
    """

    files: int
    bytes: int
    timeout: float

    @property
    def places(self) -> int:
        """Files that are being fetched, or have arrived, and are not delivered."""
        return _PLACES_PER_FETCH * self.files

    def __post_init__(self) -> None:
        if self.files < 1 or self.bytes < 1 or self.timeout <= 0:
            raise ValueError(
                f"max_files={self.files}, max_bytes={self.bytes} and timeout={self.timeout} must be positive"
            )


class Place(Generic[T]):
    """One item's place in the line: it waits to be fetched, a thread runs for it, or it has its result.

    Attributes:
        item: what the plan said, for the consumer.
        file: what to fetch.
        size: its bytes, as far as is known.
        result: the lease or the error; None until there is one.
        running: a thread fetches it.
        awaited: the consumer sleeps until it has its result.
        alone: it was fetched when nothing else was held or running and the consumer waited for it.
        given_up: a thread hangs in it; the result it may bring one day is not wanted.
    """

    __slots__ = ("alone", "awaited", "file", "given_up", "item", "result", "running", "size")

    def __init__(self, item: T, file: FileInfo, result: CachedFile | None = None) -> None:
        self.item = item
        self.file = file
        self.size = max(0, file.size)  # a manifest made by hand may not know it
        self.result: CachedFile | Exception | None = result
        self.running = False
        self.awaited = False
        self.alone = False
        self.given_up = False


def is_disk_full(result: object) -> bool:
    """Whether a result is an error that says, or was caused by one that says, that a disk is full."""
    error = result if isinstance(result, BaseException) else None
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        error = error.__cause__
    return False
