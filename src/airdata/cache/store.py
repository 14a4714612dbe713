"""One cache directory as one process sees it.

    find, open ──► the entry is there, of the right size ───────────────────────────────────────► hit
          open └─► wait for the lock of this entry ──► somebody has fetched it meanwhile ───────► hit
                                             └─► download to parts/ ──► check the length ──► rename
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
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from airdata.cache.catalogue import Catalogue
from airdata.cache.download import download, grows, size_on_disk
from airdata.cache.landing import begin, settle_down
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
T = TypeVar("T")

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
        # Held for all that a fetch does here but wait: threads that each make twenty system calls side by side hand the
        # interpreter's lock to one another at every one of them, which cost four times as much as the calls.
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
            with self._turn:
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
        source = self._sources.get(transport.volume.url) or self._source(transport)
        if not self._locks.share(source.lease):
            return None
        path = self._here(entry_name(source.generation, file, self._longest_name), file)
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
        try:
            if not looked and (path := self._here(name, file)) is not None:
                return self._staying(path, file, source, hit=True)
            part = self.layout.part(name)
            with in_transit(file, part):
                byte = self._take_flight(name, file, part)
                try:
                    if (path := self._here(name, file)) is not None:
                        return self._staying(path, file, source, hit=True)
                    if self._admit(file.size, source.generation):
                        path = self._fetch_to_stay(transport, file, name, part)
                        return self._staying(path, file, source, hit=False)
                    passing = self._pass_through(transport, file, name, part)
                finally:
                    self._locks.release(byte)
        except BaseException:
            self._locks.release(source.lease)
            raise
        self._locks.release(source.lease)
        return passing

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
        if self._locks.share(byte):
            return
        deadline = time.monotonic() + _SHARE_SECONDS
        with self._waiting():
            shared = wait_for(lambda: self._locks.share(byte), lambda: time.monotonic() < deadline)
        if not shared:
            raise DiskTroubleError(
                errno.EBUSY, f"another process has been removing files for {_SHARE_SECONDS:g} s", self.layout.root
            )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let others have the turn meanwhile."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

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

    def _take_flight(self, name: EntryName, file: FileInfo, part: str) -> int:
        """Be the only one, in any thread or process, who fetches this entry, until the lock returned is released."""
        byte = lock_bytes(name.digest)[0]
        if self._locks.exclude(byte):
            return byte
        with self._waiting():
            taken = wait_for(lambda: self._locks.exclude(byte), grows(part, self._patience))
        if not taken:
            raise DiskTroubleError(
                errno.EBUSY, f"another process fetches {file.path} and has got no byte for {self._patience:g} s", part
            )
        return byte

    def _admit(self, size: int, generation: str) -> bool:
        """Whether a file may stay; if so its bytes are promised, and ``settle`` is due."""
        now = time.monotonic()
        if now < self._full_until:
            return False
        promise = partial(self._usage.promise, size, self.limits)
        if promise():
            return True
        if self.limits.max_bytes == 0 or now < self._no_room_until:
            return False
        with self._waiting():
            made = self._upkeep.make_room(generation, self._run_start, promise)
        if made:
            return True
        self._no_room_until = now + _REST_SECONDS
        return False

    def _here(self, name: EntryName, file: FileInfo) -> str | None:
        """Where this version of a file lies, whole; None if it does not."""
        path = self.layout.first(name)
        try:
            status = os.stat(path)
            if status.st_size == file.size and name.stamped(status.st_mtime_ns):
                return path
        except OSError:
            pass
        path = self.layout.other(name)
        return path if size_on_disk(path) == file.size else None

    def _fetch_to_stay(self, transport: Transport, file: FileInfo, name: EntryName, part: str) -> str:
        stays = False
        try:
            path = self._fetch(transport, file, part, lambda: settle_down(part, file.size, name, self.layout))
            stays = True
            return path
        finally:
            self._usage.settle(file.size, stays=stays)

    def _pass_through(self, transport: Transport, file: FileInfo, name: EntryName, part: str) -> CachedFile:
        path = self.layout.passing(name)
        self._share(lock_bytes(name.digest)[1])
        try:
            hit = size_on_disk(path) == file.size
            if not hit:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self._fetch(transport, file, part, lambda: os.replace(part, path))
        except BaseException:
            self._end_passing(name)
            raise
        return CachedFile(path, file.size, hit, partial(self._end_passing, name))

    def _fetch(self, transport: Transport, file: FileInfo, part: str, land: Callable[[], T]) -> T:
        """Download to ``part`` and make that visible, in one act; it is removed when either fails."""
        try:
            # Before the source is asked, so that what is wrong with the disk shows. Nothing is ever synced: after a
            # power cut an entry may be short, and the size is checked at every hit.
            begin(part)
            self._check_directory()
            with self._waiting():
                download(transport, file, part)
            return land()
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def _check_directory(self) -> None:
        if not self._locks.is_current():
            raise FileNotFoundError(errno.ENOENT, "the cache directory was removed", self.layout.root)
