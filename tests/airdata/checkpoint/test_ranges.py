import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from airdata.checkpoint.ranges import Group, bands, coalesce, depth, pieces, split

lengths = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100)), max_size=30)


def place(gaps_and_lengths, order):
    """Ranges that do not overlap, shuffled."""
    wanted, at = [], 0
    for gap, length in gaps_and_lengths:
        wanted.append((at + gap, at + gap + length))
        at += gap + length
    order.shuffle(wanted)
    return wanted


@given(lengths, st.randoms(use_true_random=False), st.integers(1, 500), st.integers(0, 200), st.floats(0, 2))
def test_every_range_lies_in_exactly_one_group(spaced, order, max_bytes, max_gap, waste):
    wanted = place(spaced, order)
    groups = coalesce(wanted, max_bytes=max_bytes, max_gap=max_gap, waste=waste)
    assert sorted(index for group in groups for index in group.members) == list(range(len(wanted)))
    for group in groups:
        members = [wanted[index] for index in group.members]
        assert members == sorted(members)
        assert (group.start, group.end) == (members[0][0], members[-1][1])
        assert len(members) == 1 or group.end - group.start <= max_bytes
        assert all(b[0] - a[1] <= max_gap for a, b in itertools.pairwise(members))
    assert all(a.end <= b.start for a, b in itertools.pairwise(groups))


@given(lengths, st.randoms(use_true_random=False), st.integers(1, 500), st.integers(0, 200), st.floats(0, 2))
def test_the_gaps_read_in_vain_stay_within_the_budget(spaced, order, max_bytes, max_gap, waste):
    wanted = place(spaced, order)
    needed = sum(end - start for start, end in wanted)
    read = sum(g.end - g.start for g in coalesce(wanted, max_bytes=max_bytes, max_gap=max_gap, waste=waste))
    assert read - needed <= waste * needed


def test_ranges_that_overlap_are_read_each_on_their_own():
    wanted = [(0, 10), (5, 20), (5, 20), (20, 30)]
    groups = coalesce(wanted, max_bytes=100, max_gap=10, waste=1)
    assert [group.members for group in groups] == [(0,), (1,), (2, 3)]


def test_neighbours_are_one_read_whatever_the_order_of_the_keys():
    wanted = [(30, 40), (0, 10), (20, 30), (10, 20)]
    assert coalesce(wanted, max_bytes=100, max_gap=0, waste=0) == [Group(0, 40, (1, 3, 2, 0))]


def test_a_group_ends_before_it_grows_too_large():
    assert coalesce([(0, 60), (60, 120), (120, 130)], max_bytes=100, max_gap=0, waste=0) == [
        Group(0, 60, (0,)),
        Group(60, 130, (1, 2)),
    ]


def test_the_smallest_gaps_are_bridged_first():
    wanted = [(0, 100), (150, 250), (252, 352)]
    assert coalesce(wanted, max_bytes=1000, max_gap=100, waste=0.03) == [Group(0, 100, (0,)), Group(150, 352, (1, 2))]


@given(st.integers(0, 100), st.integers(0, 300), st.integers(1, 50))
def test_split_covers_a_range_once(start, length, part):
    parts = split(start, start + length, part)
    assert [at for low, high in parts for at in range(low, high)] == list(range(start, start + length))
    assert all(high - low <= part for low, high in parts)


slices = st.lists(
    st.integers(1, 6).flatmap(
        lambda size: st.integers(0, size - 1).flatmap(
            lambda start: st.tuples(st.just(size), st.just(start), st.integers(1, size - start))
        )
    ),
    max_size=4,
)


@given(slices, st.integers(1, 200))
def test_pieces_are_the_slice_and_have_no_large_gap_inside(dimensions, min_gap):
    shape, offsets, lengths = ([each[part] for each in dimensions] for part in range(3))
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)

    def elements(start, size):
        return numbers[tuple(slice(o, o + n) for o, n in zip(start, size, strict=True))].ravel().tolist()

    parts = pieces(shape, offsets, lengths, 1, min_gap)
    found = [elements(*part) for part in parts]
    assert sorted(itertools.chain(*found)) == sorted(elements(offsets, lengths))
    assert found == sorted(found)
    for inside in found:
        assert all(after - before <= min_gap for before, after in itertools.pairwise(inside))


@given(slices, st.integers(1, 40))
def test_bands_are_the_slice_in_order_and_none_spans_more_than_the_limit(dimensions, limit):
    shape, offsets, lengths = ([each[part] for each in dimensions] for part in range(3))
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    parts = bands(shape, offsets, lengths, 1, limit)
    found = [
        numbers[tuple(slice(o, o + n) for o, n in zip(start, size, strict=True))].ravel().tolist()
        for start, size in parts
    ]
    whole = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].ravel().tolist()
    assert list(itertools.chain(*found)) == whole
    for start, size in parts:
        position = depth(size)
        assert int(np.prod([*size[:position], *shape[position:]], dtype=int)) <= limit
        assert all(offset >= first for offset, first in zip(start, offsets, strict=True))


def test_a_slice_with_small_gaps_is_one_piece():
    assert pieces([100, 100], [0, 25], [100, 25], 4, 1 << 20) == [((0, 25), (100, 25))]


def test_rows_far_apart_are_asked_for_one_by_one():
    megabyte = 1 << 20
    assert pieces([2, 4, megabyte], [0, 1, 0], [2, 1, megabyte], 2, megabyte) == [
        ((0, 1, 0), (1, 1, megabyte)),
        ((1, 1, 0), (1, 1, megabyte)),
    ]
