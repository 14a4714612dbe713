"""The order of an epoch and who reads what, checked against a plain model of how PyTorch drains its workers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airdata import order as order_module
from airdata.order import EpochOrder, permute
from airdata.schedule import UNEVEN, Schedule

GOLDEN_SORTED = [8, 0, 3, 1, 10, 6, 4, 11, 5, 9, 7, 2]
GOLDEN_MAPPED = [2033544949, 1819878080, 2740044803, 1751449484]


def worker_reads(schedule: Schedule, rank: int, worker: int, workers: int, passed: int = 0) -> list[int]:
    return [p for block in schedule.positions(rank, worker, workers, passed) for p in block.tolist()]


def loader_batches(schedule: Schedule, rank: int, workers: int) -> list[list[int]]:
    """The batches a training loop gets: each worker's stream cut into batches, one worker after the other."""
    size, streams = schedule.batch_size, []
    for worker in range(workers):
        stream = worker_reads(schedule, rank, worker, workers)
        streams.append([stream[at : at + size] for at in range(0, len(stream), size)])
    turns = itertools.zip_longest(*streams)
    return [batch for turn in turns for batch in turn if batch is not None]


def drained(schedule: Schedule, workers: int) -> list[list[list[int]]]:
    return [loader_batches(schedule, rank, workers) for rank in range(schedule.world_size)]


def interleaved(ranks: list[list[list[int]]]) -> list[int]:
    """All samples, step by step and rank by rank."""
    return [p for step in itertools.zip_longest(*ranks, fillvalue=[]) for batch in step for p in batch]


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_topology_covers_the_epoch_as_its_mode_says(world: int, uneven: str) -> None:
    for n, workers, batch in itertools.product(range(61), (1, 2, 3), range(1, 6)):
        schedule = Schedule(n, 0, world, batch, uneven)  # type: ignore[arg-type]
        ranks = drained(schedule, workers)
        served = interleaved(ranks)
        if uneven == "keep":
            assert served == list(range(n)), (n, workers, batch)
        elif uneven == "drop":
            assert served == list(range(n - n % (world * batch))), (n, workers, batch)
        else:
            assert served[:n] == list(range(n))
            assert served == [p % n for p in range(len(served))] if n else served == []
            assert len(served) - n < world * batch
        if uneven != "keep":
            assert len({len(batches) for batches in ranks}) == 1
            assert {len(b) for batches in ranks for b in batches} <= {batch}
        for rank, batches in enumerate(ranks):
            assert schedule.batches(rank) == len(batches)
            assert schedule.length(rank) == sum(map(len, batches))
        assert schedule.same_batches == (len({len(batches) for batches in ranks}) == 1)


@settings(deadline=None, max_examples=400)
@given(
    n=st.integers(0, 400),
    seed=st.integers(0, 2**63),
    uneven=st.sampled_from(UNEVEN),
    segments=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=6
    ),
)
def test_restarts_on_any_topology_serve_the_epoch_in_order_without_repeat_or_gap(n, seed, uneven, segments) -> None:
    order = EpochOrder(seed, 3, n, shuffle=True)
    whole = order[np.arange(n)].tolist()
    served: list[int] = []
    start = 0
    for world, workers, batch, steps in segments:
        schedule = Schedule(n, start, world, batch, "keep")
        ranks = [batches[:steps] for batches in drained(schedule, workers)]
        served += [int(order[np.array([p])][0]) for p in interleaved(ranks)]
        start = schedule.served(steps)
        assert served == whole[:start]
    world, workers, batch, _ = segments[0]
    rest = interleaved(drained(Schedule(n, start, world, batch, uneven), workers))
    if uneven == "keep":
        assert rest == list(range(start, n))
    elif uneven == "drop":
        assert rest == list(range(start, n - (n - start) % (world * batch)))
    else:
        assert rest[: n - start] == list(range(start, n))


@given(
    n=st.integers(0, 300),
    topology=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 7)),
    uneven=st.sampled_from(UNEVEN),
    data=st.data(),
)
def test_a_worker_that_starts_late_reads_what_it_would_have_read_anyway(n, topology, uneven, data) -> None:
    world, workers, batch = topology
    schedule = Schedule(n, data.draw(st.integers(0, n)), world, batch, uneven)
    rank, worker = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, workers - 1))
    whole = worker_reads(schedule, rank, worker, workers)
    assert schedule.length(rank, worker, workers) == len(whole)
    passed = data.draw(st.integers(0, len(whole)))
    assert worker_reads(schedule, rank, worker, workers, passed) == whole[passed:]
    steps = data.draw(st.integers(0, 10))
    assert schedule.length(rank, worker, workers, steps) == len(whole[: steps * batch])


def test_the_first_sample_of_a_huge_epoch_costs_nothing() -> None:
    n = 10**12
    schedule = Schedule(n, n * 9 // 10, 64, 32)
    first = next(schedule.positions(3, 1, 6))
    assert first[0] == n * 9 // 10 + 64 * 32 + 3 * 32
    order = EpochOrder(0, 0, n, shuffle=True)
    assert len(set(order[first].tolist())) == len(first)


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["mapped one by one", "sorted"])
@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 3000), seed=st.integers(-(2**40), 2**63), epoch=st.integers(0, 10**6))
def test_an_order_is_a_permutation(limit, n, seed, epoch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "SORTED_UP_TO", limit)
        order = EpochOrder(seed, epoch, n, shuffle=True)
        assert sorted(order[np.arange(n)].tolist()) == list(range(n))


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(50_000_001, 2**44),
    groups=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 2**63),
    data=st.data(),
)
def test_an_order_of_any_size_sends_positions_to_samples_one_to_one_without_a_table(n, groups, seed, data) -> None:
    order = EpochOrder(seed, 0, n, shuffle=True, groups=groups)
    first = data.draw(st.integers(0, n - 300))
    far = data.draw(st.lists(st.integers(0, n - 1), max_size=100))
    positions = np.unique(np.array([*range(first, first + 300), *far], dtype=np.int64))
    rows = order[positions]
    assert len(np.unique(rows)) == len(positions)
    assert rows.min() >= 0
    assert rows.max() < n
    one = data.draw(st.integers(0, len(positions) - 1))
    assert order[positions[one : one + 1]].tolist() == rows[one : one + 1].tolist()
    assert order._table is None


@pytest.mark.parametrize("groups", [1, 3])
def test_an_order_too_long_to_sort_is_a_permutation_to_the_last_sample(groups) -> None:
    n = order_module.SORTED_UP_TO + 5
    order = EpochOrder(1, 2, n, shuffle=True, groups=groups)
    seen = np.zeros(n, bool)
    for first in range(0, n, 1 << 17):
        seen[order[np.arange(first, min(first + (1 << 17), n))]] = True
    assert seen.all()
    assert order._table is None


def test_orders_differ_by_seed_and_epoch_and_repeat_for_the_same() -> None:
    positions = np.arange(1000)
    orders = {
        key: tuple(EpochOrder(*key, 1000, shuffle=True)[positions].tolist())
        for key in itertools.product(range(6), range(6))
    }
    assert len(set(orders.values())) == 36
    assert tuple(EpochOrder(2, 5, 1000, shuffle=True)[positions].tolist()) == orders[2, 5]


def test_the_order_of_a_saved_position_never_changes_between_releases() -> None:
    assert EpochOrder(7, 3, 12, shuffle=True)[np.arange(12)].tolist() == GOLDEN_SORTED
    assert permute(12345, 3_000_000_000, np.arange(4)).tolist() == GOLDEN_MAPPED


def test_without_shuffle_the_order_is_the_manifests() -> None:
    assert EpochOrder(1, 2, 5, shuffle=False)[np.array([4, 0])].tolist() == [4, 0]


def test_every_permutation_of_four_is_about_as_likely() -> None:
    seen = Counter(tuple(EpochOrder(seed, 0, 4, shuffle=True)[np.arange(4)].tolist()) for seed in range(4800))
    assert len(seen) == 24
    # Chi-square with 23 degrees of freedom: 49.7 is passed once in a thousand, and the seeds are fixed.
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 49.7


def test_a_mapped_order_sends_neighbours_far_apart() -> None:
    n = 1 << 21
    rows = EpochOrder(0, 0, n, shuffle=True)[np.arange(20_000)]
    assert abs(rows.mean() / n - 0.5) < 0.01
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.03
