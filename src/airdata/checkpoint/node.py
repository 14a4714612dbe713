"""What the processes of one node read of a checkpoint together: fetched by one of them, and kept while any needs it.

    once(name) ──► there? ──► read it
               └─► the lock of that name ──► fetch ──► name.part, renamed ──► everybody else reads it

The folder lies in the machine's temporary directory. Every process holds a lock of the kernel on it while it loads, and
whoever leaves last removes it; after a SIGKILL the next load on the machine does. Nothing depends on it: where it
cannot be made, where the disk gets full, where a process is far ahead of the others, or where the process that fetches
has stopped, a process fetches for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable

from airdata.cache.locks import LockFile, locks_exclude, wait_for
from airdata.cache.root import remove_tree

__all__ = ["NodeFolder", "node_identity"]

_ALIVE = 0  # the byte of the lock file that every user of a folder shares
_LOCKS = "locks"
_PREFIX = "load-"
# Longer than a transport tries by itself: who holds a lock for longer has been stopped.
_PATIENCE = 150.0
_ATTEMPTS = 3
# What one process keeps for the others: twice the 8 reads of 32 MiB that a load has in flight. One that is further
# ahead than that has a slow or dead neighbour, and would store the whole checkpoint for it.
_OWN_BYTES = 512 << 20
# What stays free on the disk, which is often memory, whatever is being loaded: the larger of the two.
_FREE_BYTES = 1 << 30
_FREE_SHARE = 0.1


def _base() -> str:
    return os.path.join(tempfile.gettempdir(), f"airdata-loads-{os.geteuid()}")


def node_identity() -> str:
    """Equal in processes that can share a folder: those that boot together and see the same temporary directory."""
    place = os.stat(tempfile.gettempdir())
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:
        machine = os.uname().nodename
    return f"{machine}:{place.st_dev}:{place.st_ino}:{os.geteuid()}"


class NodeFolder:
    """A folder that the processes of one load share; made by :meth:`join`, to be left with :meth:`leave`."""

    def __init__(self, path: str, locks: LockFile) -> None:
        self._path = path
        self._locks = locks
        self._stored: dict[str, int] = {}  # by this process, and there when it last looked: bytes by path
        self._looking = threading.Lock()

    @staticmethod
    def join(key: str) -> NodeFolder | None:
        """The folder of a load.

        Args:
            key: the same in every process of it, and in no other load; hashed.

        Returns:
            None where there cannot be one: no locks of the kernel, no room, or somebody else's directory in its place.
        """
        try:
            base = _base()
            with contextlib.suppress(FileExistsError):
                os.mkdir(base, 0o700)
            found = os.lstat(base)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None  # in a shared temporary directory anybody may have put it there
            _remove_abandoned(base)
            path = os.path.join(base, _PREFIX + hashlib.sha256(key.encode()).hexdigest()[:32])
            return _enter(path)
        except OSError:
            return None

    def once(self, name: str, fetch: Callable[[], bytes], start: int = 0, end: int | None = None) -> bytes:
        """What ``fetch`` returns in the first process that asks for ``name``; its errors are each process's own.

        Args:
            name: of the content.
            fetch: gets all of it.
            start: first byte wanted here.
            end: one past the last.
        """
        path = os.path.join(self._path, name)
        with contextlib.suppress(OSError):
            return _read(path, start, end)
        if not self._has_room():
            return fetch()[start:end]  # without the lock: what nobody stores, nobody is to wait for
        lock = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        found: list[bytes] = []

        def there_or_mine() -> bool:
            with contextlib.suppress(OSError):
                found.append(_read(path, start, end))
                return True
            return self._locks.exclude(lock)

        deadline = time.monotonic() + _PATIENCE
        if not wait_for(there_or_mine, lambda: time.monotonic() < deadline):
            return fetch()[start:end]
        if found:
            return found[0]
        try:
            with contextlib.suppress(OSError):  # it may have come between our look and our lock
                return _read(path, start, end)
            data = fetch()
            self._keep(path, data)
            return data[start:end]
        finally:
            self._locks.release(lock)

    def done(self, name: str, users: int) -> None:
        """This process needs ``name`` no longer; the last of ``users`` to say so removes it."""
        path = os.path.join(self._path, name)
        with contextlib.suppress(OSError):
            descriptor = os.open(path + ".done", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, b".")
                last = os.fstat(descriptor).st_size >= users
            finally:
                os.close(descriptor)
            if last:
                os.unlink(path + ".done")
                os.unlink(path)

    def _has_room(self) -> bool:
        """Whether this process may store more for the others."""
        with self._looking:
            if sum(self._stored.values()) >= _OWN_BYTES:
                self._stored = {path: size for path, size in self._stored.items() if os.path.exists(path)}
            return sum(self._stored.values()) < _OWN_BYTES and _fits(self._path, 0)

    def _keep(self, path: str, data: bytes) -> None:
        if _fits(self._path, len(data)) and _store(path, data):
            with self._looking:
                self._stored[path] = len(data)

    def leave(self) -> None:
        """Stop using the folder; the last process removes it."""
        with contextlib.suppress(OSError, KeyError):
            self._locks.release(_ALIVE)
            if self._locks.exclude(_ALIVE) and self._locks.is_current():
                remove_tree(self._path)
        self._locks.close()


def _enter(path: str) -> NodeFolder | None:
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            locks = LockFile(os.path.join(path, _LOCKS))
        except FileNotFoundError:
            continue  # removed between the two, by the last user of an earlier load
        if not locks_exclude(locks.path):
            locks.close()
            return None
        if locks.share(_ALIVE) and locks.is_current():
            return NodeFolder(path, locks)
        locks.close()
    return None


def _remove_abandoned(base: str) -> None:
    """Remove the folders of loads that were killed: no process holds their lock."""
    for name in os.listdir(base):
        path = os.path.join(base, name)
        with contextlib.suppress(OSError):
            locks = LockFile(os.path.join(path, _LOCKS))
            if name.startswith(_PREFIX) and locks.exclude(_ALIVE) and locks.is_current():
                remove_tree(path)
            locks.close()


def _read(path: str, start: int, end: int | None) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        return file.read(-1 if end is None else end - start) or b""


def _fits(folder: str, size: int) -> bool:
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return False
    return disk.free - size >= max(_FREE_BYTES, _FREE_SHARE * disk.total)


def _store(path: str, data: bytes) -> bool:
    try:
        with open(path + ".part", "wb") as file:
            file.write(data)
        os.replace(path + ".part", path)
    except OSError:  # no room: the others fetch for themselves
        with contextlib.suppress(OSError):
            os.unlink(path + ".part")
        return False
    return True
