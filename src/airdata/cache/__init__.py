"""Files of a volume on local disk, fetched once and shared by all processes of a node.

    open_file ──► the volume is a plain local directory ──► its own file, in place
              ├─► with a cache ────────────────────────────► VolumeCache.open
              └─► without one ─────────────────────────────► a temporary file, removed when released

A cache that cannot be used (no space, read-only, removed, another user's) costs a warning and time, and never the run:
files then pass through the machine's temporary directory or, when that is full too, through memory.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airdata.cache.catalogue import Catalogue
from airdata.cache.in_place import file_in_place, lies_in_place
from airdata.cache.lease import CachedFile
from airdata.cache.root import (
    DIRECTORY_VARIABLE,
    CacheDirectoryError,
    Layout,
    default_directory,
    find_root,
    private_directory,
    scratch_directory,
)
from airdata.cache.store import DiskTroubleError, LocksUselessError, Store
from airdata.cache.upkeep import SourceInfo, measure
from airdata.cache.usage import Limits
from airdata.errors import FetchError
from airdata.transport import FileInfo, Transport

__all__ = [
    "CacheInfo",
    "CachedFile",
    "SourceInfo",
    "VolumeCache",
    "cache_info",
    "clear_cache",
    "find_file",
    "open_file",
]

_log = logging.getLogger(__name__)

# Longer than a transport keeps trying (120 s): a living holder of the lock has moved a byte or given up by then.
_PATIENCE = 150.0


@dataclass(frozen=True)
class CacheInfo:
    """What lies in a cache.

    Attributes:
        directory: its root.
        bytes: of the files that stay.
        files: their number.
        sources: the same by source, the one unused longest first.
        free_bytes: free on its disk, for this user.
        max_bytes: its limit, or None.
    """

    directory: str
    bytes: int
    files: int
    sources: tuple[SourceInfo, ...]
    free_bytes: int
    max_bytes: int | None


class VolumeCache:
    """Files of volumes on local disk, shared by processes and runs.

    Costs nothing to make, pickle or fork: each process opens the directory at its first file. Files are admitted until
    a limit is reached; then what is there stays, and the rest passes through while it is read. Sources that no run uses
    any more make room. On a filesystem without working locks, and on macOS, each process has a private cache for its
    lifetime.

    Args:
        directory: of this user alone; by default ``$AIRDATA_CACHE_DIR``, else ``~/.cache/airdata``, else, when that is
            on a network filesystem, ``airdata-<user id>`` in the temporary directory. A directory that holds something
            else gets a folder ``airdata`` for the cache.
        max_bytes: limit of all files; by default ``$AIRDATA_CACHE_BYTES``, else none.
        min_free_bytes: to leave free on the disk; by default ``$AIRDATA_MIN_FREE_BYTES``, else the larger of 10 % of
            the disk and 10 GiB.
        patience: seconds without a new byte after which a download by another process is not waited for any longer.

    Raises:
        ValueError: a limit is negative or not a number of bytes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        min_free_bytes: int | None = None,
        patience: float = _PATIENCE,
    ) -> None:
        self.directory = default_directory() if directory is None else os.path.abspath(os.path.expanduser(directory))
        self.limits = Limits.of(max_bytes, min_free_bytes)
        self._patience = patience
        # Travels to workers, so that train and validation data of one run do not drive each other out.
        self._made_at = time.time()
        self._reset()

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._stores: dict[str, Store] = {}  # by directory
        self._warned = False
        _caches.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("directory", "limits", "_patience", "_made_at")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"VolumeCache({self.directory!r}, {self.limits})"

    @property
    def root(self) -> str:
        """Where the cache lies: its directory, or the folder ``airdata`` in it when it holds something else."""
        return find_root(self.directory)

    def open(self, transport: Transport, file: FileInfo, *, looked: bool = False) -> CachedFile:
        """The file on local disk; fetched if it is not there yet, by one process for all. Blocks; safe in threads.

        Args:
            transport: of the volume that holds the file.
            file: from a listing of the volume; its size and version are what the bytes must have.
            looked: whether :meth:`find` has just not found it, which saves to look again before the fetch.

        Raises:
            SourceChangedError: the source is gone, or has another size or version than ``file``.
            TransferError: the source could not be read.
            FetchError: there is no place on this machine to put the file.
        """
        troubles = []
        for place in self._places():
            try:
                return self._store(place).open(transport, file, looked=looked and place == self.directory)
            except (DiskTroubleError, CacheDirectoryError) as error:  # noqa: PERF203 - seldom more than one round
                troubles.append(error)
                self._warn(
                    f"{place} cannot take files: {error}. While this lasts they pass through another directory, and "
                    "are fetched again each epoch."
                )
        reasons = "; ".join(map(str, troubles))
        raise FetchError(
            f"{transport.volume.safe_join(file.path)}: no place on this machine for its {file.size} bytes: "
            f"{reasons}. Free some space, or set {DIRECTORY_VARIABLE} or TMPDIR to a larger disk.",
            file.path,
        ) from troubles[0]

    def find(self, transport: Transport, file: FileInfo) -> CachedFile | None:
        """The file if it lies in the cache already; None, at once, if it does not. For who can do better than wait.

        Args:
            transport: of the volume that holds the file.
            file: from a listing of the volume.
        """
        try:
            return self._store(self.directory).find(transport, file)
        except OSError:
            return None  # :meth:`open` meets the same trouble, and knows what to do about it

    def info(self) -> CacheInfo:
        """What lies in the cache. Looks at every file; makes nothing."""
        layout = Layout(self.root)
        sources = tuple(measure(layout, Catalogue(layout)))
        return CacheInfo(
            layout.root,
            sum(source.bytes for source in sources),
            sum(source.files for source in sources),
            sources,
            _free_bytes(layout.root),
            self.limits.max_bytes,
        )

    def clear(self) -> int:
        """Remove every file that no process reads or writes now, and return the bytes freed.

        Raises:
            OSError: the directory belongs to another user, or cannot be written.
        """
        if not os.path.isdir(os.path.join(self.root, "files")):
            return 0
        return self._store(self.directory).clear()

    def _places(self) -> Iterator[str]:
        """Where files may go, best first; in all but the first they only pass through."""
        yield self.directory
        for place in (scratch_directory(), _MEMORY):
            if place != self.directory:
                yield place

    def _store(self, directory: str) -> Store:
        """This process's store of a directory, opened at its first use."""
        store = self._stores.get(directory)
        if store is None:
            with self._mutex:
                store = self._stores.get(directory)
                if store is None:
                    store = self._stores[directory] = self._open_store(directory)
        return store

    def _open_store(self, directory: str) -> Store:
        limits = self.limits if directory == self.directory else _NOTHING_STAYS
        new = functools.partial(Store, limits=limits, run_start=self._made_at, patience=self._patience)
        try:
            try:
                return new(directory)
            except LocksUselessError:
                self._warn(
                    f"{directory}: locks between processes do not work there, so each process has a cache of its own "
                    f"in {tempfile.gettempdir()} for as long as it lives. Set {DIRECTORY_VARIABLE} to a local disk."
                )
                return new(private_directory(), shared=False)
        except CacheDirectoryError:
            raise
        except OSError as error:
            raise DiskTroubleError(error.errno or errno.EIO, f"{error}", directory) from error

    def _warn(self, message: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(level, message)


_NOTHING_STAYS = Limits(max_bytes=0)
# The last resort when every disk is full: memory holds what is in flight, no more.
_MEMORY = f"/dev/shm/airdata-{os.geteuid()}"  # noqa: S108 - prepare_root refuses it when it is not this user's
_caches: weakref.WeakSet[VolumeCache] = weakref.WeakSet()


def _forget_stores() -> None:
    # Locks belong to the process that took them, so a forked child opens the directory anew.
    for cache in list(_caches):
        cache._reset()  # noqa: SLF001 - the module's own class


os.register_at_fork(after_in_child=_forget_stores)


def open_file(cache: VolumeCache | None, transport: Transport, file: FileInfo, *, looked: bool = False) -> CachedFile:
    """A local path for a file of a volume.

    Args:
        cache: where to keep it; None for a temporary file that goes when the lease is released.
        transport: of the volume; files of a plain local directory are not copied, with or without a cache.
        file: from a listing of the volume.
        looked: whether :func:`find_file` has just not found it.

    Raises:
        SourceChangedError: the source is gone, or has another size or version than ``file``.
        TransferError: the source could not be read.
        FetchError: there is no place on this machine to put the file.
    """
    if lies_in_place(transport.volume):
        return file_in_place(transport.volume, file)
    if cache is None:
        return _scratch(scratch_directory()).open(transport, file)
    return cache.open(transport, file, looked=looked)


def find_file(cache: VolumeCache | None, transport: Transport, file: FileInfo) -> CachedFile | None:
    """What :func:`open_file` would return, if that is on local disk already; None, at once, if it must be fetched."""
    return None if cache is None else cache.find(transport, file)


def cache_info(directory: str | os.PathLike[str] | None = None) -> CacheInfo:
    """What lies in a cache, by default the user's."""
    return VolumeCache(directory).info()


def clear_cache(directory: str | os.PathLike[str] | None = None) -> int:
    """Remove the files of a cache, by default the user's, that no process reads now; return the bytes freed."""
    return VolumeCache(directory).clear()


@functools.lru_cache(maxsize=4)
def _scratch(directory: str) -> VolumeCache:
    return VolumeCache(directory, max_bytes=0)


def _free_bytes(path: str) -> int:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize
