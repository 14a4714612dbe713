"""Locks between the processes of a node that die with their owner.

One file that is never unlinked, one byte of it for each thing to lock, and open-file-description locks
(``F_OFD_SETLK``, Linux 3.15): the kernel drops them when the last descriptor of the owner is closed, so SIGKILL leaves
nothing to clean up. A lock file per key was measured at 36 µs and leaves litter; this costs 2 µs.

A description is one owner to the kernel, so threads are kept apart by a table in the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["LockFile", "locks_exclude", "wait_for"]

_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)  # macOS and Windows have none
_REFUSED = frozenset({errno.EAGAIN, errno.EACCES})
_EXCLUSIVE = -1

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02


class LockFile:
    """Shared and exclusive locks on the bytes of one file, for the threads and processes that open it.

    Args:
        path: the file; made when missing, never removed.
        kernel: whether other processes are to be excluded; without, only threads of this process are.

    Raises:
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: str, *, kernel: bool = True) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._kernel = kernel
        status = os.fstat(self._fd)
        self._identity = status.st_dev, status.st_ino
        self._mutex = threading.Lock()
        self._held: dict[int, int] = {}  # byte -> number of shared holders, or _EXCLUSIVE
        _open_files.add(self)

    def share(self, byte: int) -> bool:
        """Take a shared lock if no other thread or process holds an exclusive one; never waits."""
        with self._mutex:
            holders = self._held.get(byte, 0)
            if holders == _EXCLUSIVE or (holders == 0 and not self._set(fcntl.F_RDLCK, byte)):
                return False
            self._held[byte] = holders + 1
            return True

    def exclude(self, byte: int) -> bool:
        """Take an exclusive lock if nobody else holds any; never waits."""
        with self._mutex:
            if byte in self._held or not self._set(fcntl.F_WRLCK, byte):
                return False
            self._held[byte] = _EXCLUSIVE
            return True

    def downgrade(self, byte: int) -> None:
        """Turn an exclusive lock into a shared one, with no moment in between."""
        with self._mutex:
            assert self._held[byte] == _EXCLUSIVE
            self._set(fcntl.F_RDLCK, byte)
            self._held[byte] = 1

    def release(self, byte: int) -> None:
        """Give one lock on a byte back."""
        with self._mutex:
            holders = self._held.pop(byte)
            if holders > 1:
                self._held[byte] = holders - 1
            else:
                self._set(fcntl.F_UNLCK, byte)

    def is_current(self) -> bool:
        """Whether the path still names the file that is locked here: someone may have removed the directory."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        # No other file can have got its number: ours is open.
        return self._fd >= 0 and (there.st_dev, there.st_ino) == self._identity

    def close(self) -> None:
        """Drop every lock of this description."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _set(self, kind: int, byte: int) -> bool:
        if not self._kernel:
            return True
        if self._fd < 0:
            if kind == fcntl.F_UNLCK:
                return True
            raise ValueError(f"the lock file {self.path} is closed, or was opened before a fork")
        assert _SET_LOCK is not None
        try:
            # struct flock of 64-bit Linux: type, whence, start, length, pid (0 for this kind).
            fcntl.fcntl(self._fd, _SET_LOCK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        return True


def wait_for(take: Callable[[], bool], go_on: Callable[[], bool]) -> bool:
    """Call ``take`` until it succeeds, or ``go_on`` says that waiting is pointless.

    Polled rather than ``F_OFD_SETLKW``: a holder that is stopped (SIGSTOP, a frozen container) must not block anybody
    for ever, and a blocked call cannot be given up.
    """
    pause = _FIRST_PAUSE
    while not take():
        if not go_on():
            return False
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 - so that many waiters do not ask in step
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def locks_exclude(path: str) -> bool:
    """Whether a lock held through one descriptor of the file keeps another one out.

    On some network filesystems locks are not implemented, and on some they succeed without excluding
    (huggingface/datasets#6744, webdataset#386). Safe to call in many processes at once.

    Raises:
        OSError: the file cannot be opened.
    """
    if _SET_LOCK is None:
        return False
    first, second = LockFile(path), LockFile(path)
    byte = (1 << 62) + random.getrandbits(60)
    try:
        return first.exclude(byte) and not second.exclude(byte) and not second.share(byte)
    except OSError as error:
        if error.errno in {errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
            return False
        raise
    finally:
        first.close()
        second.close()


_open_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares the description: its copy would keep the locks of a parent that has died. What it inherits
    # of locks is a table without force, and may be given back.
    for file in list(_open_files):
        file._mutex = threading.Lock()  # noqa: SLF001 - the module's own class; another thread may have held it
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
