"""Writing all shard files of one rank, several at a time.

plan items ──pack()──► a job for each file ──threads──► results; the first failure stops the other files and is raised
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from airdata.checkpoint.integrity import ItemRecord
from airdata.checkpoint.placement import Placement
from airdata.checkpoint.publish import StoredItem
from airdata.checkpoint.shardfile import ENVELOPE_BYTES, ShardFile
from airdata.checkpoint.workers import each
from airdata.errors import CheckpointError, StagingFullError
from airdata.transport.retry import describe

__all__ = ["FileJob", "item_bytes", "write_files"]


def item_bytes(item: WriteItem) -> int:
    """The bytes an item will take. The shard's, not the whole tensor's, which is what DCP's own packing counts."""
    if item.tensor_data is None:
        return ENVELOPE_BYTES
    element = torch.empty((), dtype=item.tensor_data.properties.dtype).element_size()
    return item.tensor_data.chunk.sizes.numel() * element + ENVELOPE_BYTES


@dataclass(frozen=True)
class FileJob:
    """One file to write: its name, the items in it, and about how many bytes they take."""

    name: str
    items: Sequence[WriteItem]
    size: int


class _StoppedError(Exception):
    """Another file of the same save failed."""


def write_files(jobs: Sequence[FileJob], placement: Placement, planner: SavePlanner, threads: int) -> list[WriteResult]:
    """Write all files, in threads. The failure that came first stops the others and is raised."""
    stop = threading.Event()

    def write(job: FileJob) -> list[WriteResult]:
        placed: list[ItemRecord] = []

        def fill(shard: ShardFile) -> None:
            placed.clear()
            for item in job.items:
                if stop.is_set():
                    raise _StoppedError
                placed.append(shard.add(planner.resolve_data(item)))

        try:
            file = placement.write(job.name, job.size, fill)
        except _StoppedError:
            raise
        except Exception as error:
            kind = StagingFullError if isinstance(error, StagingFullError) else CheckpointError
            raise kind(f"{job.name}: {describe(error)}") from error
        return [
            WriteResult(item.index, record.length, StoredItem(file, record))
            for item, record in zip(job.items, placed, strict=True)
        ]

    results = each(write, jobs, threads, "airdata-save", stop)
    return [result for part in results for result in part]
