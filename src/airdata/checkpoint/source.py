"""Reading stretches of shard files into memory that is already there.

a directory     preadv into the views: the kernel writes straight into the tensor
anything else   parts of 8 MiB, four in flight per reading thread, copied into the views
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from airdata.checkpoint.integrity import Bytes, as_bytes
from airdata.checkpoint.ranges import split
from airdata.errors import CheckpointError, CorruptCheckpointError
from airdata.transport import Transport

__all__ = ["DirectorySource", "Source", "TransportSource", "open_source", "take"]

# S3 gives one connection 50 to 100 MB/s, so that a large tensor needs several; 8 MiB is the parts' size that its own
# guidelines advise for byte-range fetches.
_PART_BYTES = 8 << 20
_PARTS_IN_FLIGHT = 4
# IOV_MAX of Linux and macOS.
_VIEWS = 1024


class Source(Protocol):
    """Fills memory from a file of the checkpoint."""

    def read_into(self, name: str, start: int, views: Sequence[Bytes]) -> None:
        """Fill the views, one after another, with the bytes of ``name`` from ``start``.

        Raises:
            CorruptCheckpointError: the file is missing, or ends too early.
            CheckpointError: it cannot be read.
        """
        ...


def open_source(transport: Transport) -> Source:
    """The source for a volume."""
    directory = transport.volume.directory
    return DirectorySource(directory) if directory is not None else TransportSource(transport)


def take(pending: list[Bytes], count: int) -> Sequence[Bytes]:
    """The memory of the next ``count`` bytes, taken off the front of ``pending`` (no view of which is empty)."""
    taken: list[Bytes] = []
    while count:
        view = pending[0]
        taken.append(view[:count])
        if count < len(view):
            pending[0] = view[count:]
        else:
            pending.pop(0)
        count -= len(taken[-1])
    return taken


class DirectorySource:
    """Files of a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read_into(self, name: str, start: int, views: Sequence[Bytes]) -> None:
        """See :class:`Source`."""
        path = os.path.join(self._directory, name)
        pending = [view.data for view in views if len(view)]
        at = start
        try:
            with open(path, "rb", buffering=0) as file:
                while pending:
                    count = os.preadv(file.fileno(), pending[:_VIEWS], at)
                    if count == 0:
                        raise CorruptCheckpointError(
                            f"{path} ends at byte {at}; {sum(map(len, pending))} more were written"
                        )
                    at += count
                    while pending and count >= len(pending[0]):
                        count -= len(pending.pop(0))
                    if count:
                        pending[0] = pending[0][count:]
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"reading {path}: {error.strerror}") from error


class TransportSource:
    """Files behind a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def read_into(self, name: str, start: int, views: Sequence[Bytes]) -> None:
        """See :class:`Source`."""
        ranges = split(start, start + sum(map(len, views)), _PART_BYTES)
        pending = [view for view in views if len(view)]
        for first in range(0, len(ranges), _PARTS_IN_FLIGHT):
            for part in self._fetch(name, ranges[first : first + _PARTS_IN_FLIGHT]):
                rest = as_bytes(part)
                for view in take(pending, len(rest)):
                    view[:] = rest[: len(view)]
                    rest = rest[len(view) :]

    def _fetch(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        path = f"{self._transport.volume}/{name}"
        try:
            return self._transport.read_ranges(name, ranges)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None
        except OSError as error:
            try:
                size = self._transport.stat(name).size
            except OSError:
                size = None
            if size is not None and size < ranges[-1][1]:
                raise CorruptCheckpointError(
                    f"{path} ends at byte {size}; bytes up to {ranges[-1][1]} were written"
                ) from error
            raise CheckpointError(str(error)) from error
