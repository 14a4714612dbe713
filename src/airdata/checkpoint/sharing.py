"""Which bytes several ranks of a node are about to read, and a source that fetches each of them once.

    each rank       the ranges it would read               prepare_local_plan    offer()
    coordinator     per node: what more than one wants      prepare_global_plan   share_out()
    each rank       those from the node's folder,           read_data             SharedSource
                    the rest from storage

Columns of a matrix lie a row apart: a rank that wants a quarter of them must read all rows, since thousands of small
requests cost more, and digests are of whole blocks. Four ranks with a quarter each read the same bytes, and so do
ranks that load replicated tensors. Small tensors in row shards lie together, a short piece for each rank: one request
brings what many would. The plans of the ranks travel with DCP's own, so no rank waits for another here.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.planner import LoadPlan

from airdata.checkpoint.integrity import Bytes, as_bytes
from airdata.checkpoint.node import NodeFolder, node_identity
from airdata.checkpoint.ranges import split
from airdata.checkpoint.source import Source, take

__all__ = ["Offer", "Share", "SharedSource", "bridge", "intersect", "merge", "offer", "overlaps", "share_out"]

Ranges = npt.NDArray[np.int64]
"""Shape ``[n, 2]``: start and end of each range of a file, sorted, apart from each other."""

# One request; see the parts of airdata.checkpoint.source.
_PIECE_BYTES = 8 << 20
# Below this a request of one's own costs no more than the detour.
_LEAST = 1 << 20
# Up to here the blocks at both ends, read for their digests, are more than a twentieth of a range.
_SHORT = 8 << 20


@dataclass(frozen=True)
class Offer:
    """What one rank would read, and on which node."""

    node: str
    ranges: Mapping[str, Ranges]


@dataclass(frozen=True)
class Share:
    """What the ranks of a node read together.

    Attributes:
        key: names their folder.
        place: of this rank among them, from 0.
        ranks: how many they are.
        pieces: by file, ``[n, 3]``: start, end, and how many of the ranks read bytes of that piece.
    """

    key: str
    place: int
    ranks: int
    pieces: Mapping[str, npt.NDArray[np.int64]]


def offer(plan: LoadPlan, reads: Sequence[tuple[str, int, int]]) -> LoadPlan:
    """The plan of this rank, with what it would read: ``(file, start, end)`` of each read."""
    try:
        node = node_identity()
    except OSError:
        return plan  # no temporary directory, nothing to share through
    files: dict[str, list[tuple[int, int]]] = {}
    for file, start, end in reads:
        files.setdefault(file, []).append((start, end))
    return replace(plan, storage_data=Offer(node, {file: merge(parts) for file, parts in files.items()}))


def share_out(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """The plans of all ranks, each with what it shares with the others of its node in place of its offer."""
    nodes: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, Offer):
            nodes.setdefault(plan.storage_data.node, []).append(rank)
    shared: list[Any] = [None] * len(plans)
    for ranks in nodes.values():
        pieces = overlaps([plans[rank].storage_data.ranges for rank in ranks]) if len(ranks) > 1 else {}
        if pieces:
            key = secrets.token_hex(16)
            for place, rank in enumerate(ranks):
                shared[rank] = Share(key, place, len(ranks), pieces)
    return [replace(plan, storage_data=share) for plan, share in zip(plans, shared, strict=True)]


def bridge(ranges: Ranges) -> Ranges:
    """Short ranges joined, as a rank may as well read them when the others read what lies between."""
    bridged: list[list[int]] = []
    before = 0  # bytes of the range before, without what was bridged
    for start, end in ranges.tolist():
        short = min(before, end - start) < _SHORT
        if bridged and short:
            bridged[-1][1] = end
        else:
            bridged.append([start, end])
        before = end - start
    return np.array(bridged, np.int64).reshape(-1, 2)


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """The bytes that are in both."""
    found: list[tuple[int, int]] = []
    for start, end in left.tolist():
        first = int(np.searchsorted(right[:, 1], start, side="right"))
        for low, high in right[first:].tolist():
            if low >= end:
                break
            found.append((max(low, start), min(high, end)))
    return merge(found)


def merge(parts: Sequence[tuple[int, int]]) -> Ranges:
    """The same bytes as ranges that are sorted and do not touch."""
    merged: list[list[int]] = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        elif end > start:
            merged.append([start, end])
    return np.array(merged, np.int64).reshape(-1, 2)


def overlaps(
    wants: Sequence[Mapping[str, Ranges]], piece: int = _PIECE_BYTES, least: int = _LEAST
) -> dict[str, npt.NDArray[np.int64]]:
    """The pieces of each file that more than one of ``wants`` reads, once bridged, and how many do.

    No byte is in them that nobody wants.

    Args:
        wants: by rank and file.
        piece: bytes of a piece, at most.
        least: stretches shorter than this are left out.
    """
    found = {}
    for file in sorted({name for want in wants for name in want}):
        own = [want[file] for want in wants if file in want]
        wanted = merge(np.concatenate(own).tolist())
        ranges = np.concatenate([intersect(bridge(each), wanted) for each in own])
        edges = np.unique(ranges)
        steps = np.zeros(len(edges), np.int64)
        np.add.at(steps, np.searchsorted(edges, ranges[:, 0]), 1)
        np.add.at(steps, np.searchsorted(edges, ranges[:, 1]), -1)
        several = np.flatnonzero(np.cumsum(steps)[:-1] > 1)
        stretches = merge([(int(edges[at]), int(edges[at + 1])) for at in several])
        pieces = np.array(
            [part for start, end in stretches.tolist() if end - start >= least for part in split(start, end, piece)],
            np.int64,
        ).reshape(-1, 2)
        users = sum((_touches(each, pieces) for each in own), np.zeros(len(pieces), np.int64))
        if (users > 1).any():
            found[file] = np.column_stack([pieces, users])[users > 1]
    return found


def _touches(ranges: Ranges, pieces: Ranges) -> npt.NDArray[np.int64]:
    """For each piece, 1 if any of the ranges has bytes in it."""
    next_range = np.searchsorted(ranges[:, 1], pieces[:, 0], side="right")
    starts = np.append(ranges[:, 0], np.iinfo(np.int64).max)
    touched: npt.NDArray[np.int64] = (starts[next_range] < pieces[:, 1]).astype(np.int64)
    return touched


class SharedSource:
    """A source whose shared pieces are fetched once for all ranks of the node.

    Args:
        source: of everything.
        share: what is shared.
        reads: all that will be read, ``(file, start, end)``: a piece is given up after the last one that needs it.
    """

    def __init__(self, source: Source, share: Share, reads: Sequence[tuple[str, int, int]]) -> None:
        self._source = source
        self._folder = NodeFolder.join(share.key)
        self._pieces = share.pieces
        self._lock = threading.Lock()
        # Files are numbered, since a name may be too long for another name inside it.
        self._numbers = {file: number for number, file in enumerate(sorted(share.pieces))}
        self._needed = Counter(
            (file, piece) for file, start, end in reads for piece, _ in self._parts(file, start, end) if piece
        )

    def read_into(self, name: str, start: int, views: Sequence[Bytes]) -> None:
        """See :class:`Source`."""
        if self._folder is None:
            self._source.read_into(name, start, views)
            return
        pending = [view for view in views if len(view)]
        end = start + sum(map(len, pending))
        for piece, (low, high) in self._parts(name, start, end):
            targets = take(pending, high - low)
            if piece is None:
                self._source.read_into(name, low, targets)
            else:
                rest = as_bytes(self._shared(self._folder, name, piece, (low, high)))
                for target in targets:
                    target[:] = rest[: len(target)]
                    rest = rest[len(target) :]

    def close(self) -> None:
        """Give the folder up."""
        if self._folder is not None:
            self._folder.leave()
            self._folder = None

    def _shared(self, folder: NodeFolder, file: str, piece: tuple[int, int, int], part: tuple[int, int]) -> bytes:
        """The bytes of ``part`` of a file, which lie in ``piece``."""
        start, end, users = piece

        def fetch() -> bytes:
            buffer = np.empty(end - start, np.uint8)
            self._source.read_into(file, start, [buffer])
            return bytes(buffer.data)

        name = f"{self._numbers[file]}-{start}-{end}"
        data = folder.once(name, fetch, part[0] - start, part[1] - start)
        with self._lock:
            self._needed[file, piece] -= 1
            over = not self._needed[file, piece]
        if over:
            folder.done(name, users)
        return data

    def _parts(self, file: str, start: int, end: int) -> Sequence[tuple[tuple[int, int, int] | None, tuple[int, int]]]:
        """``[start, end)`` of a file in parts: each with the shared piece that holds it, or None."""
        parts: list[tuple[tuple[int, int, int] | None, tuple[int, int]]] = []
        at = start
        pieces = self._pieces.get(file, np.empty((0, 3), np.int64))
        first = int(np.searchsorted(pieces[:, 1], start, side="right"))
        last = int(np.searchsorted(pieces[:, 0], end))
        for low, high, users in pieces[first:last].tolist():
            if low > at:
                parts.append((None, (at, low)))
            parts.append(((low, high, users), (max(low, start), min(high, end))))
            at = min(high, end)
        if at < end:
            parts.append((None, (at, end)))
        return parts
