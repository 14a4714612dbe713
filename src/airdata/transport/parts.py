"""One large file by parallel ranges.

    parts 0 1 2 3 4 5 …  ◄─ claimed in order by a few threads, each: request ──► bytes ──► write at its offset

A single connection to an object store carries some tens of MB/s, whatever the network could do. The number of parts
under way is bounded for the process, and so are the bytes in memory. Parts are repeated one by one, and a part that
arrives is progress for all of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["LARGE_BYTES", "PART_BYTES", "exactly", "fetch_parts", "write_whole", "written_so_far"]

# Measured against a store with 20 ms to the first byte and 40 MB/s for each connection: benchmarks/data/large_files.py.
PART_BYTES = 8 << 20
LARGE_BYTES = 2 * PART_BYTES
_THREADS_PER_FILE = 8
_PARTS_PER_PROCESS = 12

ReadPart = Callable[[tuple[int, int], Callable[[], int]], Any]


class _Slots:
    """The parts that this process may have under way."""

    free = threading.BoundedSemaphore(_PARTS_PER_PROCESS)

    @classmethod
    def after_fork(cls) -> None:
        # The threads that held slots are not there any more.
        cls.free = threading.BoundedSemaphore(_PARTS_PER_PROCESS)


os.register_at_fork(after_in_child=_Slots.after_fork)


def exactly(data: Any, start: int, end: int) -> Any:
    """Return the bytes of a part, if they are as many as were asked for.

    Raises:
        ConnectionError: they are not (a store may answer a range with less: mlcommons/storage#593).
    """
    if len(data) != end - start:
        raise ConnectionError(f"bytes {start} to {end} were asked for and {len(data)} came")
    return data


def fetch_parts(destination: str | os.PathLike[str], size: int, read: ReadPart) -> int:
    """Write a file of ``size`` bytes, fetched in parts, to the local file ``destination`` (overwritten).

    Args:
        destination: the local file.
        size: of the whole, in bytes.
        read: called by several threads with a part (start, end), and a function that tells how many bytes of the whole
            file have arrived; returns the bytes ``[start, end)``, any object with a buffer. It tries again by itself.

    Returns:
        ``size``.

    Raises:
        Exception: the first failure of ``read`` or of the disk. Nothing is written to ``destination`` after that.
    """
    with open(destination, "wb") as target:
        job = _Job(target.fileno(), size, read)
        threads = [
            threading.Thread(target=job.work, name="airdata-part", daemon=True)
            for _ in range(min(_THREADS_PER_FILE, -(-size // PART_BYTES)) - 1)
        ]
        try:
            for thread in threads:
                thread.start()
            job.work()
            for thread in threads:
                if job.error is not None:
                    break  # it may be waiting for a server, and its bytes are not wanted any more
                thread.join()
        finally:
            job.close()
    if job.error is not None:
        raise job.error
    return size


def write_whole(destination: str | os.PathLike[str], data: Any) -> int:
    """Make ``data``, any object with a buffer, the content of a local file, and return its bytes.

    Three system calls, where a file object makes seven: of small files there are many.
    """
    descriptor = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        return size
    finally:
        os.close(descriptor)


def written_so_far(path: str | os.PathLike[str]) -> int:
    """How much of a local file is there; 0 for none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class _Job:
    """The parts of one file."""

    def __init__(self, descriptor: int, size: int, read: ReadPart) -> None:
        self.error: BaseException | None = None
        self._descriptor = descriptor
        self._size = size
        self._read = read
        self._lock = threading.Lock()
        self._next = 0
        self._arrived = 0
        self._closed = False

    def work(self) -> None:
        """Fetch parts until none is left, or one has failed."""
        try:
            while (part := self._claim()) is not None:
                with _Slots.free:
                    self._write(part[0], self._read(part, lambda: self._arrived))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asked for the file
            with self._lock:
                self.error = self.error or error

    def close(self) -> None:
        """From here on nothing is written, whatever still arrives."""
        with self._lock:
            self._closed = True

    def _claim(self) -> tuple[int, int] | None:
        with self._lock:
            if self.error is not None or self._closed or self._next >= self._size:
                return None
            start = self._next
            self._next = min(self._size, start + PART_BYTES)
            return start, self._next

    def _write(self, start: int, data: Any) -> None:
        rest = memoryview(data).cast("B")
        with self._lock:
            while rest and not self._closed:
                written = os.pwrite(self._descriptor, rest, start)
                rest, start = rest[written:], start + written
            self._arrived += len(data)
