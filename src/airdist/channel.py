"""Messages between the processes of a launch: one JSON object a line, over a socket that both ends inherit.

Caller and agent, and agent and rank, speak through the same few lines of code. The agent's ends never block: what a
slow caller does not take waits in `pending`, so that the agent goes on serving its ranks.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

__all__ = ["Channel"]

_READ = 1 << 16


class Channel:
    """One end of a conversation in JSON lines.

    Attributes:
        closed: True once the other end is gone; sending is then a quiet no-op, since what follows from the other's
            death is decided by whoever watches it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox = bytearray()
        self._outbox = bytearray()
        self.closed = False

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self._socket.fileno()

    @property
    def pending(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._outbox)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue one message and send what the socket takes now (all of it, if the socket blocks)."""
        self._outbox += json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is pending, as far as the socket takes it."""
        try:
            while self._outbox and not self.closed:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
        if self.closed:
            self._outbox.clear()

    def receive(self) -> list[dict[str, Any]]:
        """The complete messages of one read or, from a socket that does not block, all that have come in.

        An empty list with `closed` set marks the end of the conversation.
        """
        known = len(self._inbox)
        while not self.closed:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._inbox += data
            self.closed = not data
            if os.get_blocking(self._socket.fileno()):
                break
        if self._inbox.find(b"\n", known) < 0:
            return []
        *lines, self._inbox = self._inbox.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()
