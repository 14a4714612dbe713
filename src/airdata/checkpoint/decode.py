"""From bytes of a shard file to a tensor, or an object, in the state dict.

ReadItem ──Wanted.of()──► byte range ──read──► check() against block digests ──deliver()──► destination
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add, mul, sub
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from airdata.checkpoint.integrity import Bytes, ItemRecord, block_digests
from airdata.checkpoint.ranges import bands, depth, pieces
from airdata.checkpoint.shardfile import tensor_bytes
from airdata.errors import CheckpointError, CorruptCheckpointError

__all__ = ["Wanted", "cut", "deliver", "direct_views"]

# Inside a tensor a smaller gap is read: that costs less than a request, and digests are of 256 KiB anyhow.
_MIN_GAP = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """One item, or some rows of it, to be read.

    Attributes:
        request: DCP's.
        file: name of the shard file.
        start: first byte to read, in the file.
        end: one past the last.
        record: digests and payload offset; None for a stock checkpoint.
        rows: shape of the raw tensor that the range holds, the last dimensions whole; None when the item must be
            decoded with ``torch.load``.
        raw_start: where, in the range, the raw tensor begins.
        dtype: of the saved tensor; None for an object.
        block_bytes: size of the digested blocks; 0 when nothing is to be checked.
        descriptors: stock transforms to undo.
    """

    request: ReadItem
    file: str
    start: int
    end: int
    record: ItemRecord | None
    rows: tuple[int, ...] | None
    raw_start: int
    dtype: torch.dtype | None
    block_bytes: int
    descriptors: tuple[str, ...]

    @staticmethod
    def of(
        request: ReadItem,
        info: Any,
        *,
        record: ItemRecord | None,
        chunk: Sequence[int] | None,
        dtype: torch.dtype | None,
        block_bytes: int,
    ) -> Wanted:
        """Work out the byte range of a request.

        Args:
            request: DCP's.
            info: DCP's ``_StorageInfo`` of the item.
            record: our record of it, if there is one.
            chunk: shape of the saved shard; None for an object.
            dtype: of the saved tensor.
            block_bytes: size of the digested blocks, to which the range is widened; 0 to check nothing.
        """
        whole = Wanted(
            request=request,
            file=info.relative_path,
            start=info.offset,
            end=info.offset + info.length,
            record=record,
            rows=None,
            raw_start=0,
            dtype=dtype,
            block_bytes=block_bytes,
            descriptors=tuple(getattr(info, "transform_descriptors", None) or ()),
        )
        if record is None or record.payload_offset < 0 or chunk is None or dtype is None:
            return whole
        # Within the last dimensions everything from the first to the last element is read, and narrowed afterwards.
        position = depth(request.lengths)
        rows = (*request.lengths[:position], *chunk[position:])
        strides = [prod(chunk[dim + 1 :]) * dtype.itemsize for dim in range(position)]
        low = record.payload_offset + sum(map(mul, request.storage_offsets, strides))
        high = low + prod(rows) * dtype.itemsize
        start, end = low, high
        if block_bytes:
            start, end = low // block_bytes * block_bytes, min(record.length, -(-high // block_bytes) * block_bytes)
        return Wanted(
            request=request,
            file=whole.file,
            start=info.offset + start,
            end=info.offset + end,
            record=record,
            rows=rows,
            raw_start=low - start,
            dtype=dtype,
            block_bytes=block_bytes,
            descriptors=(),
        )

    @property
    def fqn(self) -> str:
        """Name of the tensor or object in the checkpoint."""
        return self.request.storage_index.fqn

    @property
    def raw_bytes(self) -> int:
        """Bytes of the raw tensor in the range."""
        assert self.rows is not None
        assert self.dtype is not None
        return prod(self.rows) * self.dtype.itemsize

    def check(self, parts: Sequence[Bytes]) -> None:
        """Compare what was read with its digests.

        Raises:
            CorruptCheckpointError: a block differs.
        """
        if not self.block_bytes or self.record is None:
            return
        first = (self.start - self.record.offset) // self.block_bytes
        found = block_digests(parts, self.block_bytes)
        expected = self.record.blocks[first : first + len(found)]
        if found != expected:
            bad = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            raise CorruptCheckpointError(
                f"{self.file}: {self.fqn!r} is damaged: the block at byte {self.start + bad * self.block_bytes} has "
                f"crc32c {found[bad]:08x} and was written with {expected[bad]:08x}"
            )


def cut(
    request: ReadItem,
    record: ItemRecord | None,
    chunk: Sequence[int] | None,
    dtype: torch.dtype | None,
    limit: int,
) -> Sequence[ReadItem]:
    """The request itself, or one for each part of it that is worth a read of its own.

    See :func:`pieces` and, for the ``limit`` in bytes, :func:`bands`.
    """
    if record is None or record.payload_offset < 0 or chunk is None or dtype is None:
        return [request]
    shift = list(map(sub, request.dest_offsets, request.storage_offsets))
    parts = pieces(chunk, request.storage_offsets, request.lengths, dtype.itemsize, _MIN_GAP)
    return [
        replace(
            request,
            storage_offsets=torch.Size(offsets),
            dest_offsets=torch.Size(map(add, offsets, shift)),
            lengths=torch.Size(lengths),
        )
        for part in parts
        for offsets, lengths in bands(chunk, *part, dtype.itemsize, limit)
    ]


def direct_views(item: Wanted, target: torch.Tensor) -> Sequence[Bytes] | None:
    """Memory to read an item into so that its raw bytes land in ``target``; None when they must be converted."""
    if item.rows is None or not _takes_raw(item, target):
        return None
    tail = (item.end - item.start) - item.raw_start - item.raw_bytes
    return [np.empty(item.raw_start, np.uint8), tensor_bytes(target), np.empty(tail, np.uint8)]


def _takes_raw(item: Wanted, target: torch.Tensor) -> bool:
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.layout == torch.strided
        and target.dtype == item.dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
        and tuple(target.shape) == item.rows
    )


def deliver(item: Wanted, data: Bytes, planner: LoadPlanner, lock: threading.Lock, transforms: Any) -> None:
    """Put what was read where it belongs.

    Args:
        item: what ``data`` is.
        data: the bytes of its range.
        planner: knows the destination; called under ``lock``, since planners are not written for threads.
        lock: the planner's.
        transforms: of the stock reader, for items written through an extension.
    """
    request = item.request
    if item.rows is None:
        stream: Any = io.BytesIO(data.data)
        if item.descriptors:
            stream = io.BytesIO(transforms.transform_load_stream(request, item.descriptors, stream).read())
        if request.type == LoadItemType.BYTE_IO:
            with lock:
                planner.load_bytes(request, stream)
            return
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
        offsets = tuple(request.storage_offsets)
    else:
        assert item.dtype is not None
        raw = data[item.raw_start : item.raw_start + item.raw_bytes]
        with lock:
            target = planner.resolve_tensor(request).detach()
        if _takes_raw(item, target):
            tensor_bytes(target)[:] = raw
            with lock:
                planner.commit_tensor(request, target)
            return
        # Through a tensor of its own: the payload need not be aligned to its dtype inside the buffer.
        tensor = torch.empty(item.rows, dtype=item.dtype)
        tensor_bytes(tensor)[:] = raw
        position = depth(request.lengths)
        offsets = (*[0] * position, *request.storage_offsets[position:])
    for dim, (offset, length) in enumerate(zip(offsets, request.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    with lock:
        target = planner.resolve_tensor(request).detach()
    if target.size() != tensor.size():
        raise CheckpointError(f"{item.fqn!r}: {tuple(tensor.size())} was saved and {tuple(target.size())} is wanted")
    target.copy_(tensor)
    with lock:
        planner.commit_tensor(request, target)
