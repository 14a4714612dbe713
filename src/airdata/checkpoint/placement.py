"""Where a shard file is written, and how it gets to storage.

    a directory     the file itself, under its final name: no second copy; fsync before anything names it
    anything else   memory (small files) or a staged local file ──► one upload ──► removed

Staged bytes are a budget: a thread that wants more waits for uploads to end. A full disk is waited out once, while
nothing else is staged, and is a StagingFullError after that; never a truncated file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from airdata.checkpoint.integrity import FileRecord
from airdata.checkpoint.shardfile import ShardFile
from airdata.checkpoint.staged import staged_file
from airdata.errors import StagingFullError
from airdata.transport import Transport

__all__ = ["Budget", "InPlace", "Placement", "Upload", "check_room", "sync_directory"]

Fill = Callable[[ShardFile], None]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_BUFFER = 1 << 20


class Placement(Protocol):
    """Writes one shard file, whole or not at all."""

    def write(self, name: str, estimate: int, fill: Fill) -> FileRecord:
        """Write the file ``name`` of about ``estimate`` bytes, with the content that ``fill`` adds."""
        ...


class InPlace:
    """Writes into the checkpoint's own directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def write(self, name: str, estimate: int, fill: Fill) -> FileRecord:  # noqa: ARG002 - the protocol's signature
        """Write, flush and sync the file."""
        path = os.path.join(self._directory, name)
        # O_EXCL: a name is written once. Two saves never share one.
        with _full_disk(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb", _BUFFER) as sink:
            shard = ShardFile(name, sink)
            fill(shard)
            sink.flush()
            _sync(sink.fileno())
        return shard.record()


class Upload:
    """Stages each file, then sends it.

    Args:
        transport: where to.
        staging_dir: local directory for files on their way.
        budget: bytes that may lie there at once.
        in_memory: a file of at most this many bytes goes up from memory. The round trip through a disk costs 0.8 s of
            CPU time a GB (1.9 against 1.1), even where it stays in the page cache, and upload waits for it.
    """

    def __init__(self, transport: Transport, staging_dir: str, budget: Budget, in_memory: int) -> None:
        self._transport = transport
        self._staging_dir = staging_dir
        self._budget = budget
        self._in_memory = in_memory

    def write(self, name: str, estimate: int, fill: Fill) -> FileRecord:
        """Stage the file, send it, and remove the staged copy."""
        if estimate <= self._in_memory:
            memory = io.BytesIO()
            shard = ShardFile(name, memory)
            fill(shard)
            self._transport.put(name, memory.getvalue())
            return shard.record()
        try:
            with self._budget.of(estimate):
                return self._stage_and_send(name, fill)
        except StagingFullError:
            # Others' staged files may be what fills the disk: once more, when they are gone.
            with self._budget.of(self._budget.limit):
                return self._stage_and_send(name, fill)

    def _stage_and_send(self, name: str, fill: Fill) -> FileRecord:
        with staged_file(self._staging_dir) as (sink, path):
            with _full_disk(path):
                shard = ShardFile(name, sink)
                fill(shard)
                sink.flush()
            self._transport.put(name, _LocalFile(path))
        return shard.record()


class _LocalFile:
    """A path as the transport takes it; bytes would be content."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path


class Budget:
    """A number of bytes that threads debit and credit.

    A request for more than the limit waits until it is alone, so that one large file can always go.
    """

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Hold ``size`` bytes of the budget; waits until they are free."""
        size = min(size, self.limit)
        with self._changed:
            self._changed.wait_for(lambda: self._used + size <= self.limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


def check_room(directory: str, need: int) -> None:
    """Refuse a save that cannot fit, before its first byte.

    Raises:
        StagingFullError: the file system of ``directory`` has less than ``need`` bytes left.
    """
    free = shutil.disk_usage(directory).free
    if need > free:
        raise StagingFullError(
            f"{directory}: this rank has {need / 1e6:,.1f} MB to write and {free / 1e6:,.1f} MB are free; make "
            f"room, or choose another place",
        )


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some FUSE mounts have no fsync; close is then what makes a file durable.
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
            raise


@contextlib.contextmanager
def _full_disk(path: str) -> Iterator[Any]:
    try:
        yield None
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, StagingFullError):
            raise StagingFullError(f"no room for {path}: {error.strerror}; make room, or save elsewhere") from error
        raise
