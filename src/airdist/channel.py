"""Messages between the processes of a launch: a JSON object a line, and after some lines as many raw bytes as they say.

Caller and agent, agent and rank, and the agents of several nodes speak through the same few lines of code, over a
socket that both ends inherit or one that has proved itself (`airdist.link`). The agents' ends never block: what a slow
reader does not take waits in `pending`, so that an agent goes on serving its ranks.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

__all__ = ["Channel"]

_READ = 1 << 17
_READS = 64  # at most so many in a row, so that one talker does not keep an agent from all else


class Channel:
    """One end of a conversation.

    Attributes:
        closed: True once the other end is gone; sending is then a quiet no-op, since what follows from the other's
            death is decided by whoever watches it.
        heard: bytes that came in so far; a number that stays the same is a silent other end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox = bytearray()
        self._outbox = bytearray()
        self.closed = False
        self.heard = 0

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self._socket.fileno()

    @property
    def pending(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._outbox)

    @property
    def addresses(self) -> tuple[str, str]:
        """Host addresses of this end and of the other, of a TCP connection."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def wait_at_most(self, seconds: float) -> None:
        """Let this end block from now on, but for at most so long at a time; then the other end counts as gone."""
        self._socket.settimeout(seconds)

    def send(self, kind: str, *, data: bytes | None = None, **fields: Any) -> None:
        """Queue one message and send what the socket takes now (all of it, if the socket blocks).

        Args:
            kind: what the message is.
            data: bytes that travel as they are.
            fields: everything else, as JSON.
        """
        header = {"kind": kind, **fields} if data is None else {"kind": kind, **fields, "size": len(data)}
        self._outbox += json.dumps(header, separators=(",", ":")).encode() + b"\n" + (data or b"")
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
        """The complete messages of one read or, from a socket that does not block, of what has come in.

        An empty list with `closed` set marks the end of the conversation.
        """
        for _ in range(_READS):
            if self.closed:
                break
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._inbox += data
            self.heard += len(data)
            self.closed = not data
            if os.get_blocking(self._socket.fileno()):
                break
        return self._complete()

    def _complete(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        taken = 0
        while (end := self._inbox.find(b"\n", taken) + 1) > 0:
            message = json.loads(self._inbox[taken:end])
            size = message.pop("size", None)
            if size is not None:
                if len(self._inbox) < end + size:
                    break
                message["data"] = bytes(self._inbox[end : end + size])
            taken = end + (size or 0)
            messages.append(message)
        del self._inbox[:taken]
        return messages

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()
