"""From a load plan to reads: what one rank fetches, and in which order.

plan items ──cut()──► pieces and bands ──Wanted.of()──► byte ranges ──coalesce()──► jobs, by file and position
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from airdata.checkpoint.decode import Wanted, cut
from airdata.checkpoint.integrity import IntegrityRecord, ItemRecord
from airdata.checkpoint.ranges import coalesce
from airdata.errors import CorruptCheckpointError

__all__ = ["Job", "in_turn", "make_jobs"]

# A job is one read: with 8 threads, 256 MiB in flight.
_JOB_BYTES = 32 << 20
_MAX_GAP = 8 << 20
# Of the bytes wanted; leaves room for the block ends under an amplification of 1.05.
_WASTE = 0.03


@dataclass(frozen=True)
class Job:
    """One stretch of a file to be read as a whole, and the items inside it, by position."""

    file: str
    start: int
    end: int
    items: Sequence[Wanted]

    @property
    def read(self) -> tuple[str, int, int]:
        """The file and the stretch."""
        return self.file, self.start, self.end


def make_jobs(plan: LoadPlan, metadata: Metadata, record: IntegrityRecord | None, *, check: bool) -> list[Job]:
    """What must be read for a plan.

    Args:
        plan: of this rank.
        metadata: of the checkpoint.
        record: digests of it, if there are any.
        check: whether ranges are to be widened to whole blocks, whose digests can be compared.

    Raises:
        CorruptCheckpointError: the record lacks an item of the plan.
    """
    files: dict[str, list[Wanted]] = {}
    for item in _wanted(plan, metadata, record, check=check):
        files.setdefault(item.file, []).append(item)
    return [
        Job(file, group.start, group.end, [items[index] for index in group.members])
        for file, items in files.items()
        for group in coalesce(
            [(item.start, item.end) for item in items], max_bytes=_JOB_BYTES, max_gap=_MAX_GAP, waste=_WASTE
        )
    ]


def _wanted(plan: LoadPlan, metadata: Metadata, record: IntegrityRecord | None, *, check: bool) -> Sequence[Wanted]:
    records: dict[tuple[str, int], ItemRecord] = {}
    if record is not None:
        records = {(file.name, item.offset): item for file in record.files for item in file.items}
    wanted: list[Wanted] = []
    for request in plan.items:
        info = metadata.storage_data[request.storage_index]
        found = records.get((info.relative_path, info.offset))
        if record is not None and found is None:
            raise CorruptCheckpointError(
                f"the integrity record does not know {request.storage_index.fqn!r}, {info.relative_path} at byte "
                f"{info.offset}"
            )
        entry = metadata.state_dict_metadata[request.storage_index.fqn]
        chunk = _chunk(entry, request) if isinstance(entry, TensorStorageMetadata) else None
        dtype = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
        block_bytes = record.block_bytes if record is not None and check else 0
        wanted += [
            Wanted.of(part, info, record=found, chunk=chunk, dtype=dtype, block_bytes=block_bytes)
            for part in cut(request, found, chunk, dtype, _JOB_BYTES)
        ]
    return wanted


def _chunk(entry: TensorStorageMetadata, request: ReadItem) -> Sequence[int]:
    """The shape of the saved shard that a request reads from."""
    offset = request.storage_index.offset
    hint = request.storage_index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == offset:
        return entry.chunks[hint].sizes
    return next((chunk.sizes for chunk in entry.chunks if offset is None or chunk.offsets == offset), entry.size)


def in_turn(jobs: Sequence[Job], place: int, ranks: int, threads: int) -> Sequence[Job]:
    """The jobs in an order in which ranks that read the same ones begin at different ones.

    Each then fetches a share, and finds the rest fetched by the others. They go through the jobs a window at a time, so
    that no rank is far ahead, and little is kept for the others.
    """
    window = ranks * threads
    ordered = []
    for first in range(0, len(jobs), window):
        part = jobs[first : first + window]
        turn = len(part) * place // ranks
        ordered += [*part[turn:], *part[:turn]]
    return ordered
