"""Telling the files of a listing from the markers that stores and their consoles leave for folders.

    "a/" ── the client strips the slash ──► ("a", 0 bytes) ── look at "a" ──► nothing there, or a folder: no file
                                            ("b", 0 bytes) ── look at "b" ──► an empty file

An object called ``a/``, or an empty one whose metadata says that it is a folder, stands for a folder. It cannot be read
by the name it is listed with, so each empty entry is looked at, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airdata.transport import FileInfo

__all__ = ["files_among", "names_folder"]

_LOOKS_AT_ONCE = 16
_FOLDER_KEYS = ("hdi_isfolder", "is_directory")


def files_among(listed: Iterable[FileInfo], look: Callable[[str], FileInfo | None], seen: set[str]) -> list[FileInfo]:
    """Those entries of a listing that are files.

    Args:
        listed: entries as the client lists them.
        look: the file at exactly this path; None where there is none. Called from several threads.
        seen: paths of which an empty entry can only be a marker: empty files that the listing has shown before, to
            which those found now are added, and the folder that is listed.
    """
    entries = [entry for entry in listed if entry.path]
    empty = [*dict.fromkeys(entry.path for entry in entries if entry.size == 0 and entry.path not in seen)]
    if not empty:
        return [entry for entry in entries if entry.size]
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        found = dict(zip(empty, pool.map(look, empty), strict=True))
    files = []
    for entry in entries:
        # A file "a" and the marker "a/" may both be listed as "a": the second finds nothing left.
        file = entry if entry.size else found.pop(entry.path, None)
        if file is not None:
            files.append(file)
            if entry.size == 0:
                seen.add(entry.path)
    return files


def names_folder(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata of an empty object says that it stands for a folder."""
    return any(str(metadata.get(key, "")).lower() == "true" for key in _FOLDER_KEYS)
