"""What a cache does for itself: sweep after the dead, count, make room, clear.

Nothing is removed without the exclusive lock that its readers or writers would hold, and nothing but names that we
give. A whole source leaves by one rename into ``trash/``, so that its lock is held for a moment only; dead entries of a
source in use leave one by one, before its first reader comes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from airdata.cache.catalogue import Catalogue
from airdata.cache.dead import dead_entries
from airdata.cache.locks import LockFile, wait_for
from airdata.cache.names import DIGEST, lock_bytes
from airdata.cache.root import Layout, remove_tree
from airdata.cache.usage import Limits, Usage

__all__ = ["SourceInfo", "Upkeep", "measure"]

_log = logging.getLogger(__name__)

# Bytes of the lock file, beside the one of usage.py.
_USERS = 1  # shared by every process for as long as it has the cache open
_REMOVER = 2  # who makes room or empties the trash
_PART = ".part"
_COUNT_AGAIN_SECONDS = 24 * 3600.0
_LOOK_AGAIN_SECONDS = 20 * 3600.0
_JOIN_TRIES = 200


@dataclass(frozen=True)
class SourceInfo:
    """What a cache holds of one source.

    Attributes:
        source: the URL without credentials; "" when it is not known any more.
        bytes: of its files.
        files: their number.
        last_used: seconds since the epoch.
    """

    source: str
    bytes: int
    files: int
    last_used: float


class Upkeep:
    """The upkeep of one cache by one process."""

    def __init__(self, layout: Layout, locks: LockFile, usage: Usage, catalogue: Catalogue) -> None:
        self._layout = layout
        self._locks = locks
        self._usage = usage
        self._catalogue = catalogue

    def begin(self) -> None:
        """Join the users of the cache, and clear up after those that died."""
        first = self._locks.exclude(_USERS)
        if first:
            # Nobody else is here, so every promise is a dead process's.
            self._usage.forget_promises()
            self._locks.downgrade(_USERS)
        else:
            tries = iter(range(_JOIN_TRIES))
            wait_for(lambda: self._locks.share(_USERS), lambda: next(tries, None) is not None)
        self.sweep()
        trash_left = self._empty_trash()
        if first:
            _, _, counted = self._usage.read()
            if not counted and not _names(self._layout.files):
                self._usage.counted(0, time.time())
            elif trash_left or time.time() - counted > _COUNT_AGAIN_SECONDS:
                # 0.6 s for 200,000 files: not before the first sample.
                threading.Thread(target=self._count, name="airdata-count", daemon=True).start()

    def sweep(self) -> int:
        """Remove downloads and passing files whose process has died; return their bytes."""
        freed = 0
        for name in _names(self._layout.parts):
            digest = name.removesuffix(_PART)
            if DIGEST.fullmatch(digest):
                path = os.path.join(self._layout.parts, name)
                with self._exclusive(lock_bytes(digest)[0]) as mine, contextlib.suppress(OSError):
                    if mine:
                        size = os.lstat(path).st_size
                        os.unlink(path)
                        freed += size
        for digest in _names(self._layout.transient):
            if DIGEST.fullmatch(digest):
                with self._exclusive(lock_bytes(digest)[1]) as mine:
                    if mine:
                        freed += remove_tree(os.path.join(self._layout.transient, digest))
        return freed

    def make_room(self, generation: str, run_start: float, enough: Callable[[], bool]) -> bool:
        """Remove sources that nobody has used since ``run_start``, the one unused longest first, until it is enough.

        Args:
            generation: the source to make room for, which stays.
            run_start: seconds since the epoch; what this run uses, now and then, is not for this run to remove.
            enough: says whether to stop.

        Returns:
            whether it became enough; False too when another process is making room.
        """
        with self._exclusive(_REMOVER) as mine:
            if not mine:
                return False
            for record in self._catalogue.records():
                if record.generation != generation and record.last_used < run_start:
                    freed = self._remove_source(record.generation)
                    if freed:
                        label = record.source or record.generation
                        _log.info("removed %d bytes of %s from the cache %s", freed, label, self._layout.root)
                    if enough():
                        return True
        return False

    def remove_dead(self, generation: str, limits: Limits) -> int:
        """Remove what a source has outlived, when the cache is nearly full; to be called before the first look into it.

        At most once a day, and only if no process reads the source: its readers share one lock.

        Args:
            generation: the source.
            limits: of the cache; nearly full is less room than a tenth of what it holds.

        Returns:
            the bytes freed.
        """
        used, promised, _ = self._usage.read()
        nearly_full = not limits.allow(used // 10, used, promised, os.statvfs(self._layout.root))
        if limits.max_bytes == 0 or not used or not nearly_full:
            return 0
        trash = os.path.join(self._layout.trash, f"{generation}.{secrets.token_hex(8)}")
        with self._exclusive(lock_bytes(generation)[1]) as mine:
            if not mine or not self._catalogue.is_due(generation, _LOOK_AGAIN_SECONDS):
                return 0
            source = os.path.join(self._layout.files, generation)
            with contextlib.suppress(OSError):
                os.mkdir(trash, 0o700)
            for number, place in enumerate(dead_entries(source, time.time())):
                with contextlib.suppress(OSError):
                    os.rename(place, os.path.join(trash, str(number)))
                    _remove_empty(os.path.dirname(place), source)
        freed = remove_tree(trash)
        self._usage.removed(freed)
        return freed

    def clear(self) -> int:
        """Remove every file that nobody reads or writes; return the bytes freed."""
        freed = self.sweep()
        for record in self._catalogue.records():
            freed += self._remove_source(record.generation)
        self._empty_trash()
        return freed

    def _remove_source(self, generation: str) -> int:
        """Remove one source's files unless a process reads them."""
        trash = os.path.join(self._layout.trash, f"{generation}.{secrets.token_hex(8)}")
        with self._exclusive(lock_bytes(generation)[1]) as mine:
            if not mine:
                return 0
            try:
                os.rename(os.path.join(self._layout.files, generation), trash)
            except OSError:
                return 0
        self._catalogue.forget(generation)
        freed = remove_tree(trash)
        self._usage.removed(freed)
        return freed

    def _empty_trash(self) -> bool:
        """Finish the removals of processes that died in them; returns whether there were any."""
        names = _names(self._layout.trash)
        if not names:
            return False
        with self._exclusive(_REMOVER) as mine:
            if mine:
                for name in names:
                    if DIGEST.fullmatch(name.partition(".")[0]):
                        self._usage.removed(remove_tree(os.path.join(self._layout.trash, name)))
        return True

    def _count(self) -> None:
        """Set the count of bytes right by looking at every file."""
        try:
            # What comes in meanwhile is counted by who brings it, so it must not be counted here.
            start, before = time.time(), self._usage.read()[0]
            found = sum(source.bytes for source in measure(self._layout, self._catalogue, until=start))
            self._usage.counted(found - before, start)
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread, and the count may stay as it is
            _log.info("the files of the cache %s could not be counted: %s", self._layout.root, error)

    @contextlib.contextmanager
    def _exclusive(self, byte: int) -> Iterator[bool]:
        """Hold a lock if it is free; says whether it was."""
        mine = self._locks.exclude(byte)
        try:
            yield mine
        finally:
            if mine:
                self._locks.release(byte)


def measure(layout: Layout, catalogue: Catalogue, *, until: float = math.inf) -> list[SourceInfo]:
    """What a cache holds, by source, the one unused longest first. Looks at every file: 3 µs each.

    Args:
        layout: of the cache.
        catalogue: of the cache.
        until: count only files that came before this time, in seconds since the epoch.
    """
    sources = []
    for record in catalogue.records():
        size = files = 0
        for folder, _, names in os.walk(os.path.join(layout.files, record.generation)):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(folder, name))
                    if status.st_ctime < until:
                        size += status.st_size
                        files += 1
        sources.append(SourceInfo(record.source, size, files, record.last_used))
    return sources


def _remove_empty(folder: str, top: str) -> None:
    """Remove a folder, and those it lies in below ``top``, as far as they are empty."""
    with contextlib.suppress(OSError):
        while folder != top:
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
