"""One cache directory as one process sees it.

    find, open ──► the entry is there, of the right size ───────────────────────────────────────► hit
          open └─► wait for the lock of this entry ──► somebody has fetched it meanwhile ───────► hit
                                             └─► download to parts/ ──► check the length ──► publish
                                                    to files/      while the limits allow; it stays
                                                    to transient/  else; its last reader removes it

A reader holds a shared lock: one for all the entries of a source, since entries that stay leave only with their source,
and one for each file that passes through. Who removes needs the exclusive lock, so a path in use stays, and a process
that is killed holds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from airdata.cache.catalogue import Catalogue
from airdata.cache.download import check_length, download, grows, size_on_disk
from airdata.cache.flight import Flight
from airdata.cache.landing import begin, settle_down, whole
from airdata.cache.lease import CachedFile
from airdata.cache.locks import LockFile, locks_exclude, wait_for
from airdata.cache.names import EntryName, entry_name, generation_name, lock_bytes
from airdata.cache.root import prepare_root, remove_tree
from airdata.cache.transit import in_transit
from airdata.cache.upkeep import Upkeep
from airdata.cache.usage import Limits, Usage
from airdata.errors import AirdataError
from airdata.transport import FileInfo, Transport
from airdata.volume import safe_url

__all__ = ["DiskTroubleError", "LocksUselessError", "Store"]

_log = logging.getLogger(__name__)

# What a source does not answer when it is read, so that it is our disk that speaks.
_LOCAL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# How long nothing is asked again that was just refused: a full disk, or room that nobody could make.
_REST_SECONDS = 30.0
# A remover holds its lock for one rename, or while it looks at every entry of one source: half a minute for a million.
_SHARE_SECONDS = 60.0


class DiskTroubleError(OSError):
    """The disk of the cache failed, not the source: another place may serve."""


class LocksUselessError(OSError):
    """Locks on this filesystem keep nobody out."""


class _Source(NamedTuple):
    """What every look-up of a source's files needs.

    Attributes:
        generation: the name of its folder.
        lease: the byte of the lock file that its readers share.
        release: gives one share of it back.
    """

    generation: str
    lease: int
    release: Callable[[], None]


class Store:
    """The files of one cache, for the threads of one process.

    Args:
        directory: the cache; made when missing.
        limits: what it may take.
        run_start: sources used since this time (seconds since the epoch) are not removed to make room.
        patience: seconds without a new byte after which a download by another process is not waited for any longer.
        shared: whether other processes use it too; without, no kernel locks are needed.

    Raises:
        OSError: the directory cannot be made, written, or is not ours.
        LocksUselessError: it lies on a filesystem where it cannot be shared.
    """

    def __init__(
        self, directory: str, limits: Limits, *, run_start: float, patience: float, shared: bool = True
    ) -> None:
        self.layout = prepare_root(directory)
        if shared and not locks_exclude(self.layout.locks):
            raise LocksUselessError(errno.ENOLCK, "locks between processes do not work here", self.layout.root)
        self.limits = limits
        self.pid = os.getpid()
        self._locks = LockFile(self.layout.locks, kernel=shared)
        self._usage = Usage(self.layout.usage, self._locks)
        self._catalogue = Catalogue(self.layout)
        self._upkeep = Upkeep(self.layout, self._locks, self._usage, self._catalogue)
        self._run_start = run_start
        self._patience = patience
        self._longest_name = os.pathconf(self.layout.root, "PC_NAME_MAX")
        self._sources: dict[str, _Source] = {}  # by URL
        self._mutex = threading.Lock()
        # Held for what a fetch does here before and after its download, and never while anything is waited for: threads
        # that each make twenty system calls side by side hand the interpreter's lock to one another at every one of
        # them, which cost four times as much as the calls.
        self._turn = threading.Lock()
        self._no_room_until = 0.0
        self._full_until = 0.0
        self._upkeep.begin()

    def open(self, transport: Transport, file: FileInfo, *, looked: bool = False) -> CachedFile:
        """See :meth:`airdata.cache.VolumeCache.open`.

        Args:
            transport: of the volume.
            file: of the volume.
            looked: whether :meth:`find` has just not found it.

        Raises:
            DiskTroubleError: the cache's own disk or locks failed, or the process that fetches this file is stuck.
            SourceChangedError: the source is gone or of another size than ``file`` says.
            TransferError: the source could not be read.
        """
        try:
            return self._open(transport, file, looked=looked)
        except OSError as error:
            of_the_source = isinstance(error, AirdataError) and error.errno not in _LOCAL_ERRNO
            if of_the_source or isinstance(error, DiskTroubleError):
                raise
            if error.errno in _FULL:
                self._full_until = time.monotonic() + _REST_SECONDS
            raise DiskTroubleError(error.errno or errno.EIO, f"{error}", self.layout.root) from error

    def find(self, transport: Transport, file: FileInfo) -> CachedFile | None:
        """The file if it is here to stay; None if not, or if to know would take waiting.

        Raises:
            OSError: the cache's own disk failed.
        """
        source = self._source(transport)
        if not self._locks.share(source.lease):
            return None
        path = whole(entry_name(source.generation, file, self._longest_name), file.size, self.layout)
        if path is not None:
            return self._staying(path, file, source, hit=True)
        self._locks.release(source.lease)
        return None

    def clear(self) -> int:
        """Remove every file that nobody reads or writes; return the bytes freed."""
        return self._upkeep.clear()

    def _open(self, transport: Transport, file: FileInfo, *, looked: bool) -> CachedFile:
        source = self._source(transport)
        name = entry_name(source.generation, file, self._longest_name)
        self._share(source.lease)
        stays = False
        try:
            path = None if looked else whole(name, file.size, self.layout)
            if path is not None:
                found = self._staying(path, file, source, hit=True)
            else:
                flight = Flight(lock_bytes(name.digest)[0], self.layout.part(name), file.size)
                try:
                    with in_transit(file, flight.part):
                        found = self._fly(transport, file, name, source, flight)
                finally:
                    flight.end(self._locks, self._usage)
            stays = found.on_release is source.release
            return found
        finally:
            if not stays:
                self._locks.release(source.lease)

    # --- leases ---

    def _staying(self, path: str, file: FileInfo, source: _Source, *, hit: bool) -> CachedFile:
        return CachedFile(path, file.size, hit, source.release)

    def _end_passing(self, name: EntryName) -> None:
        if os.getpid() != self.pid:
            return
        lease = lock_bytes(name.digest)[1]
        self._locks.release(lease)
        # Whoever reads it still, in any process, keeps us out and comes here later.
        with contextlib.suppress(OSError):
            if self._locks.exclude(lease):
                try:
                    remove_tree(os.path.join(self.layout.transient, name.digest))
                finally:
                    self._locks.release(lease)

    def _share(self, byte: int) -> None:
        deadline = time.monotonic() + _SHARE_SECONDS
        if not wait_for(lambda: self._locks.share(byte), lambda: time.monotonic() < deadline):
            raise DiskTroubleError(
                errno.EBUSY, f"another process has been removing files for {_SHARE_SECONDS:g} s", self.layout.root
            )

    # --- fetching ---

    def _source(self, transport: Transport) -> _Source:
        url = transport.volume.url
        source = self._sources.get(url)
        if source is None:
            with self._mutex:
                generation = generation_name(url)
                lease = lock_bytes(generation)[1]
                source = _Source(generation, lease, partial(self._locks.release, lease))
                if url not in self._sources:
                    os.makedirs(os.path.join(self.layout.files, generation), mode=0o700, exist_ok=True)
                    self._upkeep.remove_dead(generation, self.limits)
                    self._catalogue.note(generation, safe_url(url))
                    self._sources[url] = source
        return source

    def _fly(
        self, transport: Transport, file: FileInfo, name: EntryName, source: _Source, flight: Flight
    ) -> CachedFile:
        """Fetch an entry, unless another thread or process has by the time that we are the only one who may."""
        path: str | None = None

        def take_off() -> bool:
            nonlocal path
            with self._turn:
                path = self._take_off(name, file, flight)
            return flight.locked

        if not wait_for(take_off, grows(flight.part, self._patience)):
            raise DiskTroubleError(
                errno.EBUSY,
                f"another process fetches {file.path} and has got no byte for {self._patience:g} s",
                flight.part,
            )
        if path is not None:
            return self._staying(path, file, source, hit=True)
        flight.promised = flight.promised or self._make_room(file.size, source.generation)
        if not flight.promised:
            return self._pass_through(transport, file, name, flight)
        download(transport, file, flight.part)
        with self._turn:
            check_length(transport, file, flight.part)
            path = settle_down(flight.part, name, self.layout)
            flight.begun = flight.promised = False
            self._usage.settle(file.size, stays=True)
            flight.end(self._locks, self._usage)
        return self._staying(path, file, source, hit=False)

    def _take_off(self, name: EntryName, file: FileInfo, flight: Flight) -> str | None:
        """Begin a fetch if nobody else is at it; where the entry lies if somebody has been."""
        flight.locked = self._locks.exclude(flight.byte)
        if not flight.locked:
            return None
        path = whole(name, file.size, self.layout)
        if path is None:
            # Before the source is asked, so that what is wrong with the disk shows. Nothing is ever synced: after a
            # power cut an entry may be short, and the size is checked at every hit.
            flight.begun = True
            begin(flight.part)
            if not self._locks.is_current():
                raise FileNotFoundError(errno.ENOENT, "the cache directory was removed", self.layout.root)
            flight.promised = self._promise(file.size)
        return path

    def _promise(self, size: int) -> bool:
        """Whether a file may stay; if so its bytes are promised, and ``settle`` is due."""
        return time.monotonic() >= self._full_until and self._usage.promise(size, self.limits)

    def _make_room(self, size: int, generation: str) -> bool:
        """Remove what no run uses, if need be, until a file may stay; if so its bytes are promised."""
        now = time.monotonic()
        if self.limits.max_bytes == 0 or now < max(self._full_until, self._no_room_until):
            return False
        if self._upkeep.make_room(generation, self._run_start, partial(self._usage.promise, size, self.limits)):
            return True
        self._no_room_until = now + _REST_SECONDS
        return False

    def _pass_through(self, transport: Transport, file: FileInfo, name: EntryName, flight: Flight) -> CachedFile:
        path = self.layout.passing(name)
        self._share(lock_bytes(name.digest)[1])
        try:
            hit = size_on_disk(path) == file.size
            if not hit:
                download(transport, file, flight.part)
                with self._turn:
                    check_length(transport, file, flight.part)
                    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                    os.replace(flight.part, path)
                    flight.begun = False
        except BaseException:
            self._end_passing(name)
            raise
        return CachedFile(path, file.size, hit, partial(self._end_passing, name))
