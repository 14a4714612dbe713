"""How a download begins, and becomes an entry: in one act, over nothing that somebody may be reading."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from airdata.cache.names import EntryName
from airdata.cache.root import Layout

__all__ = ["begin", "settle_down"]


def begin(part: str) -> None:
    """Make the empty file that is downloaded to; to be called by the holder of the entry's lock."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        os.close(os.open(part, flags, 0o600))
    except FileExistsError:
        # Of a process that died; never written to, since it may be another name of an entry by now.
        os.unlink(part)
        os.close(os.open(part, flags, 0o600))


def settle_down(part: str, size: int, name: EntryName, layout: Layout) -> str:
    """Make a complete download of ``size`` bytes an entry that stays, in its first place if that is free.

    To be called by the holder of the entry's lock.

    Returns:
        Where it lies.

    Raises:
        OSError: the disk takes it in no place, or has not taken all of it.
    """
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(part, ns=(now, name.stamp(now)))
    here = os.stat(part)
    if here.st_size != size:
        raise OSError(errno.EIO, f"{size} bytes were written and {here.st_size} are there", part)
    if name.stamped(here.st_mtime_ns):  # else this disk keeps no time that exact
        first = layout.first(name)
        try:
            _link(part, first)
        except OSError:
            # Taken, or no place for a file, or a disk without links. What has our stamp is ours alone.
            with contextlib.suppress(OSError):
                there = os.stat(first)
                if name.stamped(there.st_mtime_ns):
                    if there.st_size != size:
                        os.replace(part, first)
                    _forget(part)
                    return first
        else:
            _forget(part)
            return first
    path = layout.other(name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    os.replace(part, path)
    return path


def _forget(part: str) -> None:
    with contextlib.suppress(OSError):  # the entry is there, and the next start sweeps
        os.unlink(part)


def _link(part: str, path: str) -> None:
    """Unlike a rename, a link replaces nothing: two versions of a file may arrive at once."""
    try:
        os.link(part, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.link(part, path)
