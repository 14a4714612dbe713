"""Checking a whole checkpoint: every byte of every file against the record of its save."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from airdata.checkpoint import layout
from airdata.checkpoint.integrity import FileRecord, IntegrityRecord, crc32c
from airdata.checkpoint.layout import Published
from airdata.checkpoint.node import NodeFolder
from airdata.checkpoint.ranges import split
from airdata.checkpoint.source import open_source
from airdata.checkpoint.workers import each
from airdata.errors import CorruptCheckpointError
from airdata.transport import Transport

__all__ = ["verify_checkpoint", "verify_files", "verify_for_node"]

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
    once: Callable[[FileRecord, Callable[[], bytes]], object] = lambda _, check: check(),
) -> None:
    """Read files in full and compare them with their crc32c.

    Args:
        transport: of the checkpoint's own folder.
        files: to be read.
        threads: files read at the same time.
        progress: called with the number of bytes of each read, from any thread.
        once: given a file and what checks it, calls that, unless somebody else has.

    Raises:
        CorruptCheckpointError: a file differs; the first one found is named, and the rest is not read.
    """
    source = open_source(transport)
    stop = threading.Event()

    def check(file: FileRecord) -> bytes:
        digest = 0
        buffer = np.empty(min(_READ_BYTES, file.size), np.uint8)
        for start, end in split(0, file.size, _READ_BYTES):
            if stop.is_set():
                raise InterruptedError(f"{file.name} is not verified: another one has failed")
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
        return b"sound"

    each(lambda file: once(file, partial(check, file)), files, threads, "airdata-verify", stop)


def verify_for_node(transport: Transport, record: IntegrityRecord, names: Collection[str], *, threads: int = 4) -> None:
    """Verify files that several processes of this node are about to read, each file in one of them.

    The others wait for it, and verify by themselves what was damaged or took too long: an error is each process's own.

    Args:
        transport: of the checkpoint's own folder.
        record: of the checkpoint.
        names: of the files that this process reads.
        threads: files read at the same time.

    Raises:
        CorruptCheckpointError: a file differs.
    """
    numbers = {file.name: number for number, file in enumerate(record.files) if file.name in names}
    files = [record.files[number] for number in numbers.values()]
    folder = NodeFolder.join(f"verified {transport.volume.url} {record.save_id}")
    if folder is None:
        verify_files(transport, files, threads=threads)
        return
    random.Random(os.getpid()).shuffle(files)  # noqa: S311 - so that processes begin at different ones
    try:
        verify_files(
            transport, files, threads=threads, once=lambda file, check: folder.once(str(numbers[file.name]), check)
        )
    finally:
        folder.leave()
