"""What one fetch holds while it is under way, and how it gives that back whatever happens."""

from __future__ import annotations

from dataclasses import dataclass

from airdata.cache.landing import forget
from airdata.cache.locks import LockFile
from airdata.cache.usage import Usage

__all__ = ["Flight"]


@dataclass
class Flight:
    """One fetch of one entry.

    Attributes:
        byte: of the lock file, held by the only one, in any thread or process, who fetches this entry.
        part: what is downloaded to.
        size: bytes of the file.
        locked: whether the lock is held.
        begun: whether the part is there.
        promised: whether room for its bytes is.
    """

    byte: int
    part: str
    size: int
    locked: bool = False
    begun: bool = False
    promised: bool = False

    def end(self, locks: LockFile, usage: Usage) -> None:
        """Give back what is still held; more than once is fine."""
        if self.promised:
            self.promised = False
            usage.settle(self.size, stays=False)
        if self.begun:
            self.begun = False
            forget(self.part)
        if self.locked:
            self.locked = False
            locks.release(self.byte)
