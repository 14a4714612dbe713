"""Which entries of a source nobody will ask for any more.

A source whose files change every day leaves yesterday's versions in the cache: other entries, under the same source,
which is in use and so never makes room as a whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from airdata.cache.names import DIGEST, FIRST

__all__ = ["dead_entries"]

# An access time is a day late with ``relatime``, and with ``noatime`` is that of the download: then what is read every
# day is fetched anew once in this time, if there is no room.
_UNREAD_SECONDS = 14 * 24 * 3600.0


class _Entry(NamedTuple):
    place: str  # what to remove: the file in its first place, or the folder that its digest names
    tail: str  # the file's path
    came: float  # by the change time, since the modification time says something else; -1: nobody's version
    read: float


def dead_entries(source: str, now: float) -> list[str]:
    """The entries that a later version of the same file has replaced, or that were not read for weeks.

    Args:
        source: the folder of a source; see :mod:`airdata.cache.names`. Every file is looked at: up to 25 µs each.
        now: seconds since the epoch.
    """
    newest: dict[str, float] = {}
    entries = list(_entries(source))
    for entry in entries:
        newest[entry.tail] = max(entry.came, newest.get(entry.tail, 0.0))
    return [entry.place for entry in entries if entry.came < newest[entry.tail] or entry.read < now - _UNREAD_SECONDS]


def _entries(source: str) -> Iterator[_Entry]:
    first = os.path.join(source, FIRST)
    for path, status in _files(first):
        # One whose modification time is that of its arrival has lost its stamp: to a copy, or to whoever wrote to it.
        lost = abs(status.st_ctime - status.st_mtime) < 1
        yield _Entry(path, path[len(first) :], -1.0 if lost else status.st_ctime, status.st_atime)
    for part in _scan(source):
        for entry in _scan(part.path) if part.name != FIRST and part.is_dir(follow_symlinks=False) else ():
            if DIGEST.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                for path, status in _files(entry.path):
                    yield _Entry(entry.path, path[len(entry.path) :], status.st_ctime, status.st_atime)


def _files(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Files below a folder; none below a link, which leads out of the cache."""
    for folder, _, names in os.walk(top) if not os.path.islink(top) else ():
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                yield path, os.lstat(path)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
