"""One client for each process, shared by its threads, and opened anew when its credentials have run out.

Nothing of a client survives a fork or a pickle: event loops and connections do not (s3fs#914, gcsfs#379), and
credentials must not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Clients"]

C = TypeVar("C")


@dataclass
class _Slot(Generic[C]):
    """The client of one process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    client: C | None = None
    proven: bool = False


class Clients(Generic[C]):
    """The client of whichever process asks."""

    def __init__(self) -> None:
        # A parent's client stays here in its forked children, so that they never run what would close it.
        self._slots: dict[int, _Slot[C]] = {}

    def __reduce__(self) -> tuple[type[Clients[C]], tuple[()]]:
        return type(self), ()

    def get(self, opener: Callable[[], C]) -> C:
        """This process's client, opened when there is none."""
        slot = self._slot()
        client = slot.client
        if client is None:
            with slot.lock:
                if slot.client is None:
                    slot.client = opener()
                client = slot.client
        return client

    def proved(self, client: C) -> None:
        """Note that the store has accepted a client."""
        slot = self._slot()
        if not slot.proven and slot.client is client:
            slot.proven = True

    def is_proven(self, client: C) -> bool:
        """Whether the store has accepted a client."""
        slot = self._slot()
        return slot.proven and slot.client is client

    def renew(self, stale: C, opener: Callable[[], C]) -> bool:
        """Replace a client that the store no longer accepts, once however many threads ask.

        Returns:
            False for a client that was never accepted: its credentials are wrong, not old.
        """
        slot = self._slot()
        with slot.lock:
            if slot.client is stale:
                if not slot.proven:
                    return False
                slot.client, slot.proven = opener(), False
        return True

    def _slot(self) -> _Slot[C]:
        pid = os.getpid()
        return self._slots.get(pid) or self._slots.setdefault(pid, _Slot())
