"""Versions of files, as the two clients tell them: one string, tagged with its kind.

    fsspec's info, obstore's meta ──► "generation:…" | "etag:…" | "mtime:…" ──► the condition of a request

Where the two tell another kind of the same file, tags differ, and whoever compares has to ask the client of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from airdata.transport import FileInfo

__all__ = ["condition", "fsspec_info", "obstore_info"]


def fsspec_info(path: str, info: dict[str, Any]) -> FileInfo:
    """A file as fsspec tells of it; a size of -1 where it does not."""
    size = info.get("size")
    return FileInfo(path, -1 if size is None else int(size), _version(info))


def _version(info: dict[str, Any]) -> str:
    """What the store tells of a file's version: the strongest token it offers, tagged with its kind."""
    for kind, keys in {
        # Before the etag: that of Google's JSON API, which gcsfs speaks, is unknown to its XML API, which obstore does.
        "generation": ("generation",),
        "etag": ("ETag", "etag", "e_tag"),
        "mtime": ("mtime", "LastModified", "last_modified", "updated", "created"),
    }.items():
        for key in keys:
            value = info.get(key)
            if value:
                # A driver may tell the time as a number in one verb and as a date in another; a version is one string.
                value = f"{value.timestamp():.6f}" if isinstance(value, datetime) else value
                value = f"{value:.6f}" if isinstance(value, float) else value
                return f"{kind}:{str(value).strip(chr(34))}"
    return ""


def obstore_info(meta: Mapping[str, Any]) -> FileInfo:
    """A file as obstore tells of it."""
    etag, generation = meta.get("e_tag"), meta.get("version")
    if generation and str(generation).isdigit() and not etag:
        version = f"generation:{generation}"
    elif etag:
        version = f"etag:{etag.strip(chr(34))}"
    else:
        version = f"mtime:{meta['last_modified'].timestamp():.6f}"
    return FileInfo(str(meta["path"]), int(meta["size"]), version)


def condition(version: str) -> dict[str, Any] | None:
    """What makes the store refuse to send another version."""
    kind, _, token = version.partition(":")
    if kind == "etag" and not token.startswith("W/"):  # a weak tag never matches (RFC 9110, section 13.1.1)
        return {"if_match": f'"{token}"'}
    return {"version": token} if kind == "generation" else None
