"""Which files of a volume are meant: globs, predicates, and the names that are never data.

pattern ──► Selection ──► prefixes: the folders worth listing
└─► keeps(path): whether a listed file is wanted
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Pattern", "Selection", "is_hidden"]

Pattern = str | Sequence[str] | Callable[[str], bool] | None

_MARKERS = frozenset({"_SUCCESS", "_delta_log", "_temporary", "Thumbs.db", "desktop.ini", "lost+found"})
_MARKER_STARTS = ("_committed_", "_started_")
_WILDCARDS = re.compile(r"[*?\[]")


def is_hidden(path: str) -> bool:
    """Whether a path is the business of some system and not data: dot files, Spark's markers, checksum files."""
    parts = path.split("/")
    return parts[-1].endswith(".crc") or any(
        part.startswith(".") or part in _MARKERS or part.startswith(_MARKER_STARTS) for part in parts
    )


@dataclass(frozen=True)
class Selection:
    """The files that a pattern means.

    Attributes:
        pattern: as the user gave it: one glob or several (``*`` and ``?`` stay inside a folder, ``**`` crosses folders,
            ``[abc]`` is a set), a predicate on the path in the volume, or None for every file.
        recursive: whether folders inside folders are searched.
    """

    pattern: Pattern = None
    recursive: bool = True

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs; none for a predicate or no pattern."""
        if self.pattern is None or callable(self.pattern):
            return ()
        globs = (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)
        if not globs or not all(isinstance(glob, str) and glob for glob in globs):
            raise ValueError(f"pattern={self.pattern!r} must be a glob, a list of globs or a function of the path")
        return tuple(glob.lstrip("/") for glob in globs)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The folders to list: the literal beginnings of the globs, without those that lie inside another."""
        folders = sorted({_literal_folder(glob) for glob in self.globs} or {""})
        kept: list[str] = []
        for folder in folders:
            if not any(outer == "" or folder.startswith(outer + "/") for outer in kept):
                kept.append(folder)
        return tuple(kept)

    def keeps(self) -> Callable[[str], bool]:
        """The predicate on a path, apart from the rule on hidden files."""
        globs = self.globs
        if callable(self.pattern):
            chosen = self.pattern
        elif globs:
            match = re.compile("|".join(f"(?:{glob_to_regex(glob)})" for glob in globs), re.DOTALL).fullmatch

            def chosen(path: str) -> bool:
                return match(path) is not None
        else:

            def chosen(path: str) -> bool:  # noqa: ARG001
                return True

        if self.recursive:
            return chosen
        folders = self.prefixes
        return lambda path: os.path.dirname(path) in folders and chosen(path)

    @property
    def names_hidden(self) -> bool:
        """Whether a glob asks for hidden names itself, as in ``.cache/*``; a predicate decides on its own."""
        return callable(self.pattern) or any(is_hidden(part) for glob in self.globs for part in glob.split("/"))

    def __str__(self) -> str:
        if self.pattern is None:
            shown = "any file"
        elif callable(self.pattern):
            shown = f"files chosen by {getattr(self.pattern, '__qualname__', self.pattern)!s}"
        else:
            shown = f"pattern {self.pattern!r}"
        return shown if self.recursive else f"{shown}, recursive=False"


def _literal_folder(glob: str) -> str:
    parts = glob.split("/")
    for number, part in enumerate(parts):
        if _WILDCARDS.search(part):
            return "/".join(parts[:number])
    return "/".join(parts[:-1])


def glob_to_regex(glob: str) -> str:
    """The regular expression of a glob; ``**/`` also stands for no folder at all."""
    regex, position = "", 0
    while position < len(glob):
        rest = glob[position:]
        if rest.startswith("**/"):
            regex, position = regex + "(?:[^/]+/)*", position + 3
        elif rest.startswith("**"):
            regex, position = regex + ".*", position + 2
        elif rest[0] == "*":
            regex, position = regex + "[^/]*", position + 1
        elif rest[0] == "?":
            regex, position = regex + "[^/]", position + 1
        elif rest[0] == "[" and "]" in rest[2:]:
            end = rest.index("]", 2)
            negated = rest[1] in "!^"
            members = rest[2:end] if negated else rest[1:end]
            if not members:
                end = rest.index("]", end + 1) if "]" in rest[end + 1 :] else end
                members = rest[2:end]
            members = members.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace("^", "\\^")
            regex, position = regex + f"(?!/)[{'^' if negated else ''}{members}]", position + end + 1
        else:
            regex, position = regex + re.escape(rest[0]), position + 1
    return regex
