"""Files that need no cache, since they lie on a plain local disk."""

from __future__ import annotations

import functools
import os

from airdata.cache.lease import CachedFile
from airdata.errors import SourceChangedError, TransferError
from airdata.transport import FileInfo
from airdata.volume import Volume

__all__ = ["file_in_place", "lies_in_place"]


@functools.lru_cache(maxsize=64)
def lies_in_place(volume: Volume) -> bool:
    """Whether a volume is a plain local directory; asked once, since the answer is in the mount table."""
    return volume.in_place


def file_in_place(volume: Volume, file: FileInfo) -> CachedFile:
    """A volume's own file, if it is as listed.

    Raises:
        SourceChangedError: it is gone, or has another size.
        TransferError: it cannot be looked at, or lies outside the volume.
    """
    directory = volume.directory
    assert directory is not None
    if file.path.startswith("/") or ".." in file.path.split("/"):
        raise TransferError(f"{file.path!r} leaves the volume {directory}")
    path = f"{directory}/{file.path}"
    try:
        size = os.stat(path).st_size
    except FileNotFoundError as error:
        raise SourceChangedError(f"{path}: it was listed with {file.size} bytes and is gone") from error
    except OSError as error:
        raise TransferError(error.errno, f"{path}: {error}") from error
    if size != file.size:
        raise SourceChangedError(f"{path}: it was listed with {file.size} bytes and has {size}; list the volume again")
    return CachedFile(path, size, hit=True)
