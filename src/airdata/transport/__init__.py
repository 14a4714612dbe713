"""How bytes move between a volume and this machine.

One small protocol, :class:`Transport`, with a driver for directories (``local``), one for every URL that fsspec knows
(``remote``) and a faster one for object stores and HTTP (``object_store``). Cache, manifest and checkpoints speak the
protocol and never a driver. Drivers open their client at the first call of each process, so a transport can be pickled,
and used on both sides of a fork.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from airdata.errors import SourceChangedError, TransferError
from airdata.transport.drivers import OBJECT_STORES
from airdata.transport.retry import DEFAULT_RETRY, Retry
from airdata.volume import Volume

__all__ = ["DEFAULT_RETRY", "FileInfo", "Retry", "Transport", "open_transport"]


@dataclass(frozen=True)
class FileInfo:
    """One file of a volume.

    Attributes:
        path: relative to the volume, ``/`` as separator, no leading slash.
        size: bytes.
        version: what changes when the content does (etag, generation, modification time); "" where the store has none.
    """

    path: str
    size: int
    version: str = ""


class Transport(Protocol):
    """The verbs we need on a volume. Paths are relative to it; every error but FileNotFoundError is a TransferError."""

    volume: Volume
    retries: int
    """Requests that were repeated in this process; only grows."""

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        """Every file below the folder ``prefix``, in no particular order. A missing folder has no files."""
        ...

    def directories(self, prefix: str = "") -> Sequence[str]:
        """The names of the folders directly in the folder ``prefix``, sorted. A missing folder has none."""
        ...

    def stat(self, path: str) -> FileInfo:
        """Size and version of one file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        """Download one file into the local file ``destination`` (overwritten) and return its size in bytes.

        A large file comes in parallel ranges, all of one version.

        Args:
            path: the file.
            destination: where its bytes go.
            version: the ``FileInfo.version`` whose bytes are wanted; "" takes whatever is there.
            size: the ``FileInfo.size``, where it is known: it saves a request for a large file.

        Raises:
            FileNotFoundError: there is no such file.
            SourceChangedError: the store holds another version.
        """
        ...

    def read(self, path: str) -> bytes:
        """The whole content of one small file."""
        ...

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """The bytes ``[start, end)`` of each range; a range past the end of the file is a TransferError."""
        ...

    def put(self, path: str, source: bytes | os.PathLike[str]) -> None:
        """Store bytes, or a local file, as one act: readers see the old content or the new, never a part."""
        ...

    def delete(self, path: str) -> None:
        """Remove one file; one that is not there is fine."""
        ...


def open_transport(volume: Volume, retry: Retry = DEFAULT_RETRY) -> Transport:
    """The driver for a volume. Costs nothing: no client is imported or opened before the first verb."""
    # The drivers import FileInfo from this module.
    from airdata.transport.local import LocalTransport  # noqa: PLC0415
    from airdata.transport.object_store import ObjectTransport  # noqa: PLC0415
    from airdata.transport.remote import FsspecTransport  # noqa: PLC0415

    if volume.directory is not None:
        return LocalTransport(volume, retry)
    if volume.url.split("://", 1)[0].lower() in {*OBJECT_STORES, "http", "https"} and ObjectTransport.available():
        return ObjectTransport(volume, retry)
    return FsspecTransport(volume, retry)


def check_version(name: str, now: FileInfo, version: str) -> None:
    """Refuse a file that is no longer the version which was listed."""
    if version and now.version != version:
        raise SourceChangedError(f"{name}: it was replaced since the listing; list the volume again")


def check_ranges(path: str, ranges: Sequence[tuple[int, int]], parts: Sequence[bytes]) -> Sequence[bytes]:
    """Return ``parts`` if each has the length its range asked for.

    A store may answer a range with less (mlcommons/storage#593), and a short part must never pass for data.
    """
    for (start, end), part in zip(ranges, parts, strict=True):
        if len(part) != end - start:
            raise TransferError(f"{path}: bytes {start} to {end} were asked for and {len(part)} came")
    return parts
