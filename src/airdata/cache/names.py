"""How the files of any volume are named on local disk.

    <root>/files/<generation>/first/<tail>
                  │                  └ the path in the volume, so that folder names stay labels and suffixes reach
                  │                    decoders; only a component no disk would take is replaced
                  └ hash of the source

    <root>/files/<generation>/<ab>/<digest>/<tail>
                               │    └ hash of source, path, size and version
                               └ its first two digits, so that no folder grows too long to search

The first version of a file that comes lies in the folders of the volume: folders of its own would cost each file two
more inodes and 8 KB of disk. Which version it is says its modification time, a stamp of 46 bits of the digest within
the last day, so that whoever looks sees a file of today. A file that somebody has written to since is nobody's version.
Whatever finds its first place taken lies below its own digest: another version, a path that a case-insensitive or
normalising disk takes for the same, an object ``a/b`` next to an object ``a``. No name leads outside the root.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from typing import NamedTuple

from airdata.transport import FileInfo

__all__ = ["DIGEST", "FIRST", "EntryName", "entry_name", "generation_name", "lock_bytes", "safe_tail"]

FIRST = "first"
DIGEST = re.compile(r"[0-9a-f]{32}")

_LONGEST_COMPONENT = 255
_LONGEST_SUFFIX = 32
# PATH_MAX is 4,096 bytes and the root needs some of it; object stores end at 1,024.
_LONGEST_TAIL = 2048
# What needs no second look: the names of most datasets.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}/){0,9}[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
# Nanoseconds in 18 hours, and so many stamps there are.
_STAMPS = (1 << 16) * 10**9
# Below this are the bytes of the lock file with a fixed meaning.
_FIRST_LOCK_BYTE = 1024


class EntryName(NamedTuple):
    """Where one version of one file lies.

    Attributes:
        generation: 32 hex digits, the source.
        digest: 32 hex digits, the source, path, size and version.
        tail: a relative path that is safe on this disk and ends as the path in the volume does.
    """

    generation: str
    digest: str
    tail: str

    def stamp(self, now: int) -> int:
        """The modification time of this version in its first place: the last one that is its own.

        Args:
            now: ns since the epoch, as is the answer.
        """
        return now - (now - int(self.digest[:14], 16)) % _STAMPS

    def stamped(self, time: int) -> bool:
        """Whether a modification time, in ns since the epoch, is a stamp of this version."""
        return self.stamp(time) == time


def generation_name(url: str) -> str:
    """The name of a source's part of the cache."""
    return blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def entry_name(generation: str, file: FileInfo, longest_component: int = _LONGEST_COMPONENT) -> EntryName:
    """The name of one version of a file.

    Args:
        generation: from :func:`generation_name`.
        file: path, size and version count.
        longest_component: bytes the disk allows between two slashes.
    """
    # The length keeps ("a", "1") and ("a1", "") apart.
    key = f"{generation}{len(file.path)}:{file.path}{file.size}:{file.version}"
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return EntryName(generation, digest, safe_tail(file.path, longest_component))


def lock_bytes(digest: str) -> tuple[int, int]:
    """The two bytes of the lock file that belong to a digest: who fetches it, and who reads it."""
    first = _FIRST_LOCK_BYTE + 2 * int(digest[:15], 16)  # 60 bits: offsets end at 2**63
    return first, first + 1


def safe_tail(path: str, longest_component: int = _LONGEST_COMPONENT) -> str:
    """A relative path that this disk can hold, equal to ``path`` except for the components that it cannot.

    A component that is empty, ``.`` or ``..``, has a NUL, cannot be encoded or is too long is replaced by a readable
    beginning, a hash, and its own suffix.
    """
    if longest_component >= _LONGEST_COMPONENT and _PLAIN.fullmatch(path):
        return path
    tail = "/".join(_safe_component(part, longest_component) for part in path.split("/"))
    if len(os.fsencode(tail)) > _LONGEST_TAIL:
        kept: list[str] = []
        for part in reversed(tail.split("/")):
            if len(os.fsencode("/".join([part, *kept]))) > _LONGEST_TAIL // 2:
                break
            kept.insert(0, part)
        tail = "/".join([_hash(path), *kept])
    return tail


def _safe_component(part: str, longest: int) -> str:
    if part not in {"", ".", ".."} and "\0" not in part and _length(part) <= longest:
        return part
    stem, suffix = os.path.splitext(part)
    suffix = _encodable(suffix)
    if _length(suffix) > _LONGEST_SUFFIX:
        stem, suffix = part, ""
    stem = _encodable(stem).lstrip(".")
    room = longest - len(suffix.encode()) - 1 - len(_hash(""))
    readable = stem.encode()[:room].decode("utf-8", "ignore")
    return f"{readable}~{_hash(part)}{suffix}"


def _length(part: str) -> int:
    """Bytes on disk; more than any limit when the name cannot be encoded at all."""
    try:
        return len(os.fsencode(part))
    except UnicodeEncodeError:
        return 1 << 30


def _encodable(part: str) -> str:
    return part.encode("utf-8", "replace").decode().replace("\0", "_")


def _hash(part: str) -> str:
    return blake2b(part.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
