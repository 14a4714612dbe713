"""Where an entry lies, how its download begins, and how that becomes an entry: in one act, over nothing being read."""

from __future__ import annotations

import contextlib
import os
import time

from airdata.cache.download import size_on_disk
from airdata.cache.names import EntryName
from airdata.cache.root import Layout

__all__ = ["begin", "forget", "settle_down", "whole"]


def whole(name: EntryName, size: int, layout: Layout) -> str | None:
    """Where this version of a file of ``size`` bytes lies, whole; None if it does not."""
    path = layout.first(name)
    try:
        status = os.stat(path)
        if status.st_size == size and name.stamped(status.st_mtime_ns):
            return path
    except OSError:
        pass
    path = layout.other(name)
    return path if size_on_disk(path) == size else None


def begin(part: str) -> None:
    """Make the empty file that is downloaded to; to be called by the holder of the entry's lock."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        os.close(os.open(part, flags, 0o600))
    except FileExistsError:
        # Of a process that died; never written to, since it may be another name of an entry by now.
        os.unlink(part)
        os.close(os.open(part, flags, 0o600))


def settle_down(part: str, name: EntryName, layout: Layout) -> str:
    """Make a complete download an entry that stays, in its first place if that is free.

    To be called by the holder of the entry's lock.

    Returns:
        Where it lies.

    Raises:
        OSError: the disk takes it in no place.
    """
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(part, ns=(now, name.stamp(now)))
    here = os.stat(part)
    if name.stamped(here.st_mtime_ns):  # else this disk keeps no time that exact
        first = layout.first(name)
        try:
            _link(part, first)
        except OSError:
            # Taken, or no place for a file, or a disk without links. What has our stamp is ours alone.
            with contextlib.suppress(OSError):
                there = os.stat(first)
                if name.stamped(there.st_mtime_ns):
                    if there.st_size != here.st_size:
                        os.replace(part, first)
                    forget(part)
                    return first
        else:
            forget(part)
            return first
    path = layout.other(name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    os.replace(part, path)
    return path


def forget(part: str) -> None:
    """Remove the name of a download, or leave it to the sweep of the next start."""
    with contextlib.suppress(OSError):
        os.unlink(part)


def _link(part: str, path: str) -> None:
    """Unlike a rename, a link replaces nothing: two versions of a file may arrive at once."""
    try:
        os.link(part, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.link(part, path)
