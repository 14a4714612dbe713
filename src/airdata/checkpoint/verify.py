"""Checking a whole checkpoint: every byte of every file against the record of its save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from airdata.checkpoint import layout
from airdata.checkpoint.integrity import FileRecord, crc32c
from airdata.checkpoint.layout import Published
from airdata.checkpoint.ranges import split
from airdata.checkpoint.source import open_source
from airdata.checkpoint.workers import each
from airdata.errors import CorruptCheckpointError
from airdata.transport import Transport

__all__ = ["verify_checkpoint", "verify_files"]

_READ_BYTES = 8 << 20


def verify_checkpoint(
    transport: Transport, *, threads: int = 4, progress: Callable[[int], object] | None = None
) -> Published:
    """Read every byte of a checkpoint and compare it with the digests of its save.

    Args:
        transport: of the checkpoint's own folder.
        threads: files read at the same time.
        progress: called with the number of bytes of each read, from any thread.

    Returns:
        The checkpoint. Of one that a stock writer saved only this is known: its files are there.

    Raises:
        CheckpointNotFoundError: nothing is published here.
        CorruptCheckpointError: something is missing, has another size, or differs; names the file.
    """
    published = layout.read_published(transport)
    layout.check_sizes(transport, published.files())
    if published.record is not None:
        verify_files(transport, published.record.files, threads=threads, progress=progress)
    return published


def verify_files(
    transport: Transport,
    files: Sequence[FileRecord],
    *,
    threads: int = 4,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Read files in full and compare them with their crc32c.

    Raises:
        CorruptCheckpointError: a file differs; the first one found is named, and the rest is not read.
    """
    source = open_source(transport)
    stop = threading.Event()

    def check(file: FileRecord) -> None:
        digest = 0
        buffer = np.empty(min(_READ_BYTES, file.size), np.uint8)
        for start, end in split(0, file.size, _READ_BYTES):
            if stop.is_set():
                return
            view = buffer[: end - start]
            source.read_into(file.name, start, [view])
            digest = crc32c(view, digest)
            if progress is not None:
                progress(end - start)
        if digest != file.crc32c:
            raise CorruptCheckpointError(
                f"{transport.volume}/{file.name} is damaged: its crc32c is {digest:08x} and was "
                f"{file.crc32c:08x} when written"
            )

    each(check, files, threads, "airdata-verify", stop)
