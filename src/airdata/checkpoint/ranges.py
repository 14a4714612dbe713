"""Which bytes to fetch: pure functions from wanted ranges to read requests.

a slice of a tensor ──► pieces without large gaps ──► bands of a bounded size ──► wanted ranges of one file
wanted ranges ──sort──► neighbours joined, smallest gaps first, within a budget of waste ──► groups
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Group", "bands", "coalesce", "depth", "pieces", "split"]


@dataclass(frozen=True)
class Group:
    """One stretch of a file that is read as a whole.

    Attributes:
        start: first byte.
        end: one past the last byte.
        members: indexes of the wanted ranges inside it, by position.
    """

    start: int
    end: int
    members: tuple[int, ...]


def coalesce(wanted: Sequence[tuple[int, int]], *, max_bytes: int, max_gap: int, waste: float) -> list[Group]:
    """Join wanted ranges of a file into few reads.

    Args:
        wanted: ``[start, end)`` of each range, in any order; they may touch, and should not overlap.
        max_bytes: no group of several ranges grows beyond this.
        max_gap: a larger gap is never read.
        waste: bytes of gaps read, at most, as a fraction of the bytes wanted. The smallest gaps are bridged first,
            since each saves one request whatever its size.

    Returns:
        Groups by position; every range is a member of exactly one.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gaps = []
    end = 0
    for position, index in enumerate(order):
        if position:
            gaps.append((wanted[index][0] - end, position))
        end = max(end, wanted[index][1])
    budget = waste * sum(stop - start for start, stop in wanted)
    joined = set()
    for gap, position in sorted(gaps):
        if gap > max_gap or gap > budget:
            break
        # Ranges that overlap have memory of their own each, and are read each on their own.
        if gap >= 0:
            budget -= gap
            joined.add(position)
    groups: list[Group] = []
    for position, index in enumerate(order):
        start, stop = wanted[index]
        last = groups[-1] if groups else None
        if last and position in joined and stop - last.start <= max_bytes:
            groups[-1] = Group(last.start, stop, (*last.members, index))
        else:
            groups.append(Group(start, stop, (index,)))
    return groups


def split(start: int, end: int, part_bytes: int) -> list[tuple[int, int]]:
    """Cut ``[start, end)`` into parts of ``part_bytes``, the last one possibly smaller."""
    return [(at, min(end, at + part_bytes)) for at in range(start, end, part_bytes)]


def pieces(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int, min_gap: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a slice of a stored tensor where there is much between its parts that is not wanted.

    One rank's columns of a matrix lie apart by the other ranks' columns: reading from the first to the last reads all
    of them. Where such a gap is large it pays to ask once for each row (an expert's share of ``[experts, in, out]``).

    Args:
        shape: of the stored tensor, row-major.
        offsets: where the slice begins, in each dimension.
        lengths: of the slice.
        itemsize: bytes of one element.
        min_gap: bytes; a smaller gap is read and thrown away.

    Returns:
        Offsets and lengths of the pieces, in the order of their bytes; together they are the slice.
    """
    whole = [(tuple(offsets), tuple(lengths))]
    if len(shape) < 2 or 0 in lengths:  # noqa: PLR2004 - a vector has no rows
        return whole
    rest = shape[1:]
    strides = [prod(rest[dim + 1 :]) * itemsize for dim in range(len(rest))]
    span = itemsize + sum((length - 1) * stride for length, stride in zip(lengths[1:], strides, strict=True))
    # Within one row, too, parts may lie apart, whatever is between the rows.
    within = pieces(rest, offsets[1:], lengths[1:], itemsize, min_gap)
    if lengths[0] > 1 and prod(rest) * itemsize - span < min_gap and len(within) == 1:
        return whole
    return [((offsets[0] + row, *inner), (1, *sizes)) for row in range(lengths[0]) for inner, sizes in within]


def bands(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int, limit: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a slice of a stored tensor into runs of rows.

    A large tensor is then read by several threads, and a slice that is not contiguous needs no buffer of its size.

    Args:
        shape: of the stored tensor, row-major.
        offsets: where the slice begins, in each dimension.
        lengths: of the slice.
        itemsize: bytes of one element.
        limit: bytes from the first to the last row of a band, at most, unless a single element has more.

    Returns:
        Offsets and lengths, as :func:`pieces`.
    """
    position = depth(lengths)
    if not position or 0 in lengths:
        return [(tuple(offsets), tuple(lengths))]
    dim = position - 1
    row_bytes = prod(shape[position:]) * itemsize
    rows = max(1, limit // row_bytes)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for row in range(0, lengths[dim], rows):
        start = (*offsets[:dim], offsets[dim] + row, *offsets[position:])
        size = (*lengths[:dim], min(rows, lengths[dim] - row), *lengths[position:])
        found += bands(shape, start, size, itemsize, limit) if row_bytes > limit else [(start, size)]
    return found


def depth(lengths: Sequence[int]) -> int:
    """How many dimensions of a slice are found by position: those of length one that lead, and the one after."""
    ones = next((dim for dim, length in enumerate(lengths) if length != 1), len(lengths))
    return min(ones + 1, len(lengths))
