"""How much a cache holds, and whether one more file may come in.

Files are admitted until the limit and then what is there stays: every epoch reads each file once, so the file used last
is the one needed latest. At half the dataset LRU hits 0.15 of a shuffled epoch and keeping hits 0.50, which is the
optimum (CoorDL, VLDB 2021, "MinIO cache").
"""

from __future__ import annotations

import os
import re
import struct
import threading
from dataclasses import dataclass

from airdata.cache.locks import LockFile, wait_for

__all__ = ["BYTES_VARIABLE", "MIN_FREE_VARIABLE", "Limits", "Usage"]

BYTES_VARIABLE = "AIRDATA_CACHE_BYTES"
MIN_FREE_VARIABLE = "AIRDATA_MIN_FREE_BYTES"

_LOCK_BYTE = 0
_MAGIC = 0x61697264_61746131
_RECORD = struct.Struct("=Qqqd")  # magic, bytes that stay, bytes promised to downloads under way, time of last count
_TRIES = 400

_FLOOR_SHARE = 0.10
_FLOOR_BYTES = 10 << 30
_INODE_SHARE = 0.05
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """What a cache may take.

    Attributes:
        max_bytes: of its files; None for no limit of its own.
        min_free_bytes: to leave free on the disk; None for the larger of 10 % and 10 GiB.
    """

    max_bytes: int | None = None
    min_free_bytes: int | None = None

    @staticmethod
    def of(max_bytes: int | None, min_free_bytes: int | None) -> Limits:
        """Limits as given, else as the environment says.

        Raises:
            ValueError: a limit is negative, or not a number of bytes.
        """
        return Limits(
            _from_environment(BYTES_VARIABLE) if max_bytes is None else _checked("max_bytes", max_bytes),
            _from_environment(MIN_FREE_VARIABLE)
            if min_free_bytes is None
            else _checked("min_free_bytes", min_free_bytes),
        )

    def floor(self, disk: os.statvfs_result) -> int:
        """Bytes of this disk to leave free."""
        if self.min_free_bytes is not None:
            return self.min_free_bytes
        return max(int(_FLOOR_SHARE * disk.f_blocks * disk.f_frsize), _FLOOR_BYTES)

    def allow(self, size: int, used: int, promised: int, disk: os.statvfs_result) -> bool:
        """Whether one more file may come in and stay.

        Args:
            size: of the file, in bytes.
            used: bytes of the files that are here.
            promised: bytes of files that are on their way; a part of them is on the disk already.
            disk: state of the disk that holds the cache.
        """
        if self.max_bytes is not None and (self.max_bytes == 0 or used + promised + size > self.max_bytes):
            return False
        if disk.f_files and disk.f_favail < _INODE_SHARE * disk.f_files:  # 0: this filesystem does not count inodes
            return False
        return disk.f_bavail * disk.f_frsize - promised - size >= self.floor(disk)


class Usage:
    """The count of bytes, in one small file that all processes update under a lock.

    Read and written, not mapped: a mapped page of a file that a full disk cannot store ends the process with SIGBUS.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, locks: LockFile) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._locks = locks
        self._mutex = threading.Lock()
        self._folder = os.path.dirname(path)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read(self) -> tuple[int, int, float]:
        """Bytes that stay, bytes promised, and when they were last counted (0 if never)."""
        data = os.pread(self._fd, _RECORD.size, 0)
        if len(data) == _RECORD.size:
            magic, used, promised, counted = _RECORD.unpack(data)
            if magic == _MAGIC:
                return max(0, used), max(0, promised), counted
        return 0, 0, 0.0

    def promise(self, size: int, limits: Limits) -> bool:
        """Reserve room for a file, if the limits allow."""
        disk = os.statvfs(self._folder)  # takes longer than all that is done under the lock
        with self._mutex:
            if not self._lock():
                return False
            try:
                used, promised, counted = self.read()
                if not limits.allow(size, used, promised, disk):
                    return False
                self._write(used, promised + size, counted)
                return True
            finally:
                self._locks.release(_LOCK_BYTE)

    def settle(self, size: int, *, stays: bool) -> None:
        """Turn a promise into bytes that stay, or take it back."""
        self._change(size if stays else 0, -size)

    def removed(self, size: int) -> None:
        """Note that files of this many bytes are gone."""
        self._change(-size, 0)

    def forget_promises(self) -> None:
        """Drop the promises of processes that died; to be called when no other process uses the cache."""
        with self._mutex:
            if self._lock():
                try:
                    used, _, counted = self.read()
                    self._write(used, 0, counted)
                finally:
                    self._locks.release(_LOCK_BYTE)

    def counted(self, difference: int, now: float) -> None:
        """Correct the bytes that stay after a count that found them ``difference`` off."""
        self._change(difference, 0, now)

    def _change(self, used_by: int, promised_by: int, counted_at: float | None = None) -> None:
        with self._mutex:
            # Without the lock the count is off by one file until the next count; waiting longer would be worse.
            if not self._lock():
                return
            try:
                used, promised, counted = self.read()
                self._write(used + used_by, promised + promised_by, counted if counted_at is None else counted_at)
            finally:
                self._locks.release(_LOCK_BYTE)

    def _write(self, used: int, promised: int, counted: float) -> None:
        os.pwrite(self._fd, _RECORD.pack(_MAGIC, max(0, used), max(0, promised), counted), 0)

    def _lock(self) -> bool:
        tries = iter(range(_TRIES))  # some 8 s: a holder that is stopped must not stop all
        return wait_for(lambda: self._locks.exclude(_LOCK_BYTE), lambda: next(tries, None) is not None)


def _checked(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name}={value} must be a number of bytes, 0 or more")
    return value


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ValueError(f"{name}={text!r} is not a number of bytes such as 500000000, 500MB or 200GiB")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)
