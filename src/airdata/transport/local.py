"""Files of a directory: a local disk, or a mount (FUSE, NFS) of something remote."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from airdata.errors import TransferError
from airdata.transport import FileInfo, check_ranges, check_version
from airdata.transport.parts import written_so_far
from airdata.transport.patience import Wanted, within
from airdata.transport.retry import DEFAULT_RETRY, Retry
from airdata.volume import Volume, filesystem_type

__all__ = ["LocalTransport"]

T = TypeVar("T")

_COPY_BYTES = 1 << 20


class LocalTransport:
    """The verbs of :class:`airdata.transport.Transport` on a directory."""

    def __init__(self, volume: Volume, retry: Retry = DEFAULT_RETRY) -> None:
        assert volume.directory is not None
        self.volume = volume
        self.retries = 0
        self._root = volume.directory
        self._retry = retry
        self._on_network: bool | None = None  # asked of the kernel at the first verb

    def _full(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise TransferError(f"{path!r} leaves the volume {self.volume}")
        return os.path.join(self._root, *path.split("/"))

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        pending = [self._full(prefix)]
        while pending:
            folder = pending.pop()
            for entry in self._call(f"listing {folder}", lambda _, folder=folder: _scan(folder)):  # type: ignore[misc]
                if entry.is_dir():
                    # A link to a folder is followed only when it cannot lead back up into a loop.
                    if not entry.is_symlink() or not _leads_up(entry.path):
                        pending.append(entry.path)
                    continue
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # a dangling link, or a file removed while we list
                relative = os.path.relpath(entry.path, self._root).replace(os.sep, "/")
                yield FileInfo(relative, status.st_size, f"mtime:{status.st_mtime_ns}")

    def directories(self, prefix: str = "") -> Sequence[str]:
        folder = self._full(prefix)
        entries = self._call(f"listing {folder}", lambda _: _scan(folder))
        return sorted(entry.name for entry in entries if entry.is_dir())

    def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        status = self._call(f"stat of {full}", lambda _: os.stat(full))
        return FileInfo(path, status.st_size, f"mtime:{status.st_mtime_ns}")

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        del size  # one stream is as quick as a disk
        full = self._full(path)

        def copy(wanted: Wanted) -> int:
            with open(full, "rb") as source:
                wanted.check()
                with open(destination, "wb") as target:
                    while chunk := source.read(_COPY_BYTES):
                        wanted.check()
                        target.write(chunk)
                    return target.tell()

        copied = self._call(f"reading {full}", copy, lambda: written_so_far(destination))
        if version:  # a directory has no conditional read, but its times tell of a change before or during ours
            check_version(full, self.stat(path), version)
        return copied

    def read(self, path: str) -> bytes:
        full = self._full(path)

        def whole(_: Wanted) -> bytes:
            with open(full, "rb") as source:
                return source.read()

        return self._call(f"reading {full}", whole)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        full = self._full(path)
        parts: list[bytes] = []

        def read(wanted: Wanted) -> None:
            with open(full, "rb") as source:
                for start, end in ranges[len(parts) :]:
                    part = os.pread(source.fileno(), end - start, start)
                    wanted.check()
                    parts.append(part)

        self._call(f"reading {full}", read, lambda: len(parts))
        return check_ranges(full, ranges, parts)

    def put(self, path: str, source: bytes | os.PathLike[str]) -> None:
        full = self._full(path)
        folder = os.path.dirname(full)
        self._call(f"writing {full}", lambda _: os.makedirs(folder, exist_ok=True))
        upload = _Upload(full, source)
        write = upload.write_and_compare if filesystem_type(folder).startswith("fuse") else upload.write_and_replace
        self._call(f"writing {full}", write, lambda: upload.written)

    def delete(self, path: str) -> None:
        full = self._full(path)

        def remove(wanted: Wanted) -> None:
            with contextlib.suppress(FileNotFoundError):
                wanted.commit(lambda: os.unlink(full))

        self._call(f"removing {full}", remove)

    def _call(self, what: str, verb: Callable[[Wanted], T], progress: Callable[[], int] | None = None) -> T:
        if self._on_network is None:
            self._on_network = not self.volume.in_place
        if self._on_network:
            moved, seconds = progress or (lambda: 0), self._retry.deadline
            return self._retry.call(
                what, lambda: within(seconds, what, verb, moved), progress=progress, again=self._count
            )
        return self._retry.call(what, lambda: verb(Wanted()), progress=progress, again=self._count)

    def _count(self) -> None:
        self.retries += 1


def _scan(folder: str) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _leads_up(link: str) -> bool:
    target = os.path.realpath(link)
    return (
        os.path.realpath(os.path.dirname(link)).startswith((target + os.sep, target))
        and os.path.commonpath([target, os.path.realpath(os.path.dirname(link))]) == target
    )


class _Upload:
    """One file on its way into the directory; ``written`` is how many of its bytes the current attempt has written."""

    def __init__(self, full: str, source: bytes | os.PathLike[str]) -> None:
        self.written = 0
        self._full = full
        self._source = source

    def write_and_replace(self, wanted: Wanted) -> None:
        """A new file beside the old one, which takes its place in one act."""
        folder = os.path.dirname(self._full)
        temporary = os.path.join(folder, f".airdata-{secrets.token_hex(8)}.part")
        # Not mkstemp, whose files only their owner can read: what is stored on a volume is as shared as the umask says.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._copy_into(descriptor, wanted)
            wanted.commit(lambda: os.replace(temporary, self._full))
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says more
                os.unlink(temporary)
            raise
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def write_and_compare(self, wanted: Wanted) -> None:
        """One sequential write, then a read back: volume mounts have no append, no links, and rename by copying."""

        def overwrite() -> None:
            self._copy_into(os.open(self._full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), wanted)

        wanted.commit(overwrite)  # all of it: from the first moment the old file is gone, and any byte may be the last
        expected = len(self._source) if isinstance(self._source, bytes) else os.path.getsize(self._source)
        size = os.path.getsize(self._full)
        if size != expected:
            raise OSError(f"{expected} bytes were written to {self._full} and {size} are there")
        if isinstance(self._source, bytes):
            with open(self._full, "rb") as written:
                if written.read() != self._source:
                    raise OSError(f"{self._full} reads back other bytes than were written")

    def _copy_into(self, target_fd: int, wanted: Wanted) -> None:
        self.written = 0
        with (
            open(target_fd, "wb") as target,
            io.BytesIO(self._source) if isinstance(self._source, bytes) else open(self._source, "rb") as source,
        ):
            while chunk := source.read(_COPY_BYTES):
                wanted.check()
                self.written += target.write(chunk)
            # flush before fsync: torch <= 2.13 synced an empty file because it had these the other way round.
            target.flush()
            os.fsync(target.fileno())
