"""How many fetches run at once, against stores made of arithmetic: the limit finds what each of them can take."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.prefetch.pace import Pace

MB = 1 << 20


def run(pace: Pace, size: int, seconds: Callable[[int], float], files: int, *, seed: int = 0) -> list[int]:
    """Fetch files, each of which takes ``seconds(running)`` more or less; the limit after each."""
    chance, now, ends, limits = random.Random(seed), 0.0, [], []
    for _ in range(files):
        while len(ends) < pace.limit:
            heapq.heappush(ends, now + seconds(pace.limit) * chance.uniform(0.9, 1.1))
        now = heapq.heappop(ends)
        pace.finished(size, now, more=True)
        limits.append(pace.limit)
    return limits


def usual(limits: list[int]) -> float:
    """The mean over the second half, when the climb is over."""
    half = limits[len(limits) // 2 :]
    return sum(half) / len(half)


def far_store(running: int) -> float:
    """50 ms each, however many: small files in a bucket."""
    return 0.05


def narrow_line(running: int) -> float:
    """Two fill the line: large files over a network."""
    return 0.2 * max(1.0, running / 2)


def crowd(running: int) -> float:
    """Each takes all of a processor, and many get in each other's way."""
    return 0.002 * running * (1 + (running / 16) ** 2)


def test_small_files_of_a_far_store_get_all_the_requests_there_may_be() -> None:
    assert usual(run(Pace(64, 110_000), 110_000, far_store, 6000)) > 58


def test_the_climb_is_quick() -> None:
    limits = run(Pace(64, 110_000), 110_000, far_store, 400)
    assert 64 in limits


def test_large_files_that_fill_the_line_get_few() -> None:
    assert usual(run(Pace(64, 64 * MB), 64 * MB, narrow_line, 6000)) < 8


def test_fetches_that_get_in_each_others_way_become_fewer() -> None:
    assert usual(run(Pace(64, 110_000), 110_000, crowd, 6000)) < 8


def test_a_store_that_gets_further_away_is_noticed() -> None:
    pace = Pace(64, 64 * MB)
    run(pace, 64 * MB, narrow_line, 2000)
    few = pace.limit
    assert usual(run(pace, 110_000, far_store, 20_000)) > 3 * few


@pytest.mark.parametrize("store", [far_store, narrow_line, crowd])
def test_trying_costs_little_of_the_throughput(store) -> None:
    limits = run(Pace(64, 110_000), 110_000, store, 20_000)[5000:]
    best = max(limit / store(limit) for limit in range(1, 65))
    reached = sum(limit / store(limit) for limit in limits) / len(limits)
    assert reached > 0.85 * best


def test_a_consumer_that_sets_the_pace_changes_nothing() -> None:
    pace = Pace(64, 1000)
    for number in range(1000):
        pace.finished(1000, number * 0.01, more=False)
    assert pace.limit == Pace(64, 1000).limit


@given(
    most=st.integers(1, 200),
    ends=st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e9), st.booleans()), max_size=400),
)
def test_the_limit_stays_within_its_bounds(most: int, ends: list[tuple[int, float, bool]]) -> None:
    pace = Pace(most, 1000)
    for size, now, more in ends:
        pace.finished(size, now, more=more)
        assert min(4, most) <= pace.limit <= most
