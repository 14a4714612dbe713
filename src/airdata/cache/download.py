"""One download into the cache: to a file of the length that was listed, or an error that says why it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from airdata.errors import SourceChangedError
from airdata.transport import FileInfo, Transport

__all__ = ["check_length", "download", "grows", "size_on_disk"]


def download(transport: Transport, file: FileInfo, part: str) -> None:
    """Bring a file to the local path ``part``, which exists; :func:`check_length` is due.

    Raises:
        SourceChangedError: it is gone.
        TransferError: it could not be read.
    """
    try:
        transport.get(file.path, part, file.version, file.size)
    except FileNotFoundError as error:
        if not os.path.exists(part):
            raise  # it was our side that vanished
        raise SourceChangedError(
            f"{transport.volume.safe_join(file.path)}: it was listed with {file.size} bytes and is gone"
        ) from error


def check_length(transport: Transport, file: FileInfo, part: str) -> None:
    """See that a download has on this disk the length that was listed.

    Raises:
        SourceChangedError: it has another one.
    """
    size = os.stat(part).st_size
    if size != file.size:
        raise SourceChangedError(
            f"{transport.volume.safe_join(file.path)}: it was listed with {file.size} bytes and {size} came. "
            "The file was replaced since the listing, or the source answered short; list the volume again."
        )


def size_on_disk(path: str) -> int:
    """Bytes of a local file; -1 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def grows(part: str, patience: float) -> Callable[[], bool]:
    """A condition that holds until ``part`` has not changed its size for ``patience`` seconds."""
    size, since = -2, 0.0  # it is first looked at when somebody has to wait

    def go_on() -> bool:
        nonlocal size, since
        now = time.monotonic()
        if (current := size_on_disk(part)) != size:
            size, since = current, now
        return now - since < patience

    return go_on
