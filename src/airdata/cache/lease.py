"""The promise that a local file stays readable while somebody may still open it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

__all__ = ["CachedFile"]

_Self = TypeVar("_Self", bound="CachedFile")


@dataclass
class CachedFile:
    """A lease: the file stays readable until :meth:`release`, or until the process ends.

    Attributes:
        local_path: absolute; ends with the file's path in the volume.
        size: bytes.
        hit: whether the file was on local disk already.
    """

    local_path: str
    size: int
    hit: bool
    on_release: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Give the lease back; more than once is fine."""
        action, self.on_release = self.on_release, None
        if action is not None:
            action()

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019 - typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
