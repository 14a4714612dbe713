"""Files of a node on their way to where the caller has them: in order, bounded, and whole before anybody is told.

An agent that shares no directory with its caller follows the files it writes (logs as they grow, results once they are
there) and sends what is new in chunks, as the link takes them. The files stay where they are, so a slow link costs no
memory and holds no rank up; what has been sent is one number for each file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

    from airdist.channel import Channel

__all__ = ["CHUNK", "Mirror"]

CHUNK = 1 << 17
_AHEAD = 1 << 20  # bytes that may wait for the link: enough to keep it busy, and little for heartbeats to wait behind


class _Followed:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None
        self.sent = 0


class Mirror:
    """Sends files below a directory through a channel.

    Attributes:
        root: the directory; names are relative to it.
        channel: where they go.
        open: whether the other end wants more at present.
    """

    def __init__(self, root: Path, channel: Channel) -> None:
        self.root = root
        self.channel = channel
        self.open = True
        self._files: dict[str, _Followed] = {}

    def follow(self, path: Path) -> None:
        """Send this file, now and whenever it has grown."""
        self._files.setdefault(str(path.relative_to(self.root)), _Followed(path))

    def pump(self) -> None:
        """Send what is new, as far as the link takes it."""
        for name, followed in self._files.items():
            while self.open and self.channel.pending < _AHEAD and not self.channel.closed:
                data = self._read(followed)
                if not data:
                    break
                self.channel.send("file", name=name, offset=followed.sent, data=data)
                followed.sent += len(data)

    def done(self, *paths: Path) -> bool:
        """Whether all that is in these files (by default in all) has been handed to the link."""
        names = [str(path.relative_to(self.root)) for path in paths] or list(self._files)
        return all(self._files[name].sent >= _size(self._files[name].path) for name in names if name in self._files)

    def close(self) -> None:
        """Close the files."""
        for followed in self._files.values():
            if followed.file is not None:
                followed.file.close()

    @staticmethod
    def _read(followed: _Followed) -> bytes:
        if followed.file is None:
            if not followed.path.exists():
                return b""
            followed.file = followed.path.open("rb")
        return os.pread(followed.file.fileno(), CHUNK, followed.sent)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
