"""Files on local disk on their way to a store, which outlive a killed process only until the next save.

    staged_file()        made and locked ──► written ──► sent ──► removed
    remove_abandoned()   locked by nobody: its process was killed ──► removed

The kernel drops a lock when the last descriptor of its file is closed, so a SIGKILL needs no cleaning up by hand; 1 GiB
for each thread would stay otherwise, and the job that comes after finds its disk full.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["remove_abandoned", "staged_file"]

_PREFIX, _SUFFIX = "airdata-staged-", ".distcp"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}\{_SUFFIX}")
_BUFFER = 1 << 20


@contextlib.contextmanager
def staged_file(directory: str) -> Iterator[tuple[BinaryIO, str]]:
    """An empty file to write to, and its path; removed at the end.

    Raises:
        OSError: there can be none in ``directory``.
    """
    sink, path = _make(directory)
    try:
        yield sink, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.suppress(OSError):  # a full disk, which says so a second time
            sink.close()


def _make(directory: str) -> tuple[BinaryIO, str]:
    while True:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=directory)
        sink = open(descriptor, "wb", _BUFFER)  # noqa: SIM115 - given to the caller
        # A save that begins may have found it before it was locked, and be about to remove it.
        if _lock(descriptor) and os.path.exists(path):
            return sink, path
        sink.close()


def remove_abandoned(directory: str) -> None:
    """Remove what killed processes left, as far as it is this user's."""
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except OSError:
        return  # a folder that one may write to and not list
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks, where nobody can take it for abandoned either
    return True
