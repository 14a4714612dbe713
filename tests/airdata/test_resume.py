"""Resume: one integer, valid on every topology, counted by what the training loop received."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from airdata import DataLoader, UCVolumeDataset
from airdata.errors import StateError
from airdata.received import Received
from airdata.schedule import UNEVEN
from airdata.state import Place, Report, Start, State, pack_source, resume_source

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*ranks get one batch less")


class Numbers(IterableDataset):
    """Decodes: one sample from each file."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self):
        for path in self.source:
            yield int(os.path.basename(path)[4:9])


class Odd(Numbers):
    """Drops about half."""

    def __iter__(self):
        return (number for number in super().__iter__() if number % 2)


class Expand(Numbers):
    """Makes none to three samples of each file."""

    def __iter__(self):
        for number in super().__iter__():
            yield from (number * 10 + part for part in range(number % 4))


class Thrice(Numbers):
    """Makes three of each."""

    def __iter__(self):
        for number in super().__iter__():
            yield from (number * 10 + part for part in range(3))


class Pairs(Numbers):
    """Makes one of two, and of the last alone."""

    def __iter__(self):
        numbers = super().__iter__()
        for first in numbers:
            yield first * 1000 + next(numbers, 999)


class OddPairs(IterableDataset):
    """A wrapper around a wrapper."""

    def __init__(self, source) -> None:
        self.inner = Odd(source)

    def __iter__(self):
        return (number + 0.5 for number in self.inner)


WRAPPERS = [Odd, Expand, Thrice, Pairs, OddPairs]


def numbers(batches) -> list[float]:
    return [number for batch in batches for number in (batch.tolist() if isinstance(batch, torch.Tensor) else batch)]


def some(iterator, count: int) -> list[float]:
    return numbers(itertools.islice(iterator, count))


@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, 8), (4, 8)])
def test_every_step_of_three_epochs_can_be_saved_and_resumed(volume, workers, prefetch) -> None:
    directory, batch = volume(13), 3

    def loader() -> DataLoader:
        dataset = Numbers(UCVolumeDataset(directory, shuffle=True, seed=4))
        return DataLoader(
            dataset, batch_size=batch, num_workers=workers, prefetch_factor=prefetch, persistent_workers=workers > 1
        )

    whole = loader()
    epochs = [numbers(whole) for _ in range(4)]
    running = loader()
    assert running.state_dict()["samples_served"] == 0
    for epoch in range(3):
        iterator, received = iter(running), 0
        while True:
            state = json.loads(json.dumps(running.state_dict()))
            assert (state["epoch"], state["samples_served"], state["source"]) == (epoch, min(received * batch, 13), "")
            resumed = loader()
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            if workers < 2 or received in {0, 2, 5}:
                assert numbers(resumed) == epochs[epoch][received * batch :]
                assert resumed.state_dict()["samples_served"] == 0
                assert numbers(resumed) == epochs[epoch + 1]
            if next(iterator, None) is None:
                break
            received += 1
        assert running.state_dict() == {**state, "epoch": epoch + 1, "samples_served": 0}


def test_a_run_that_changes_world_workers_and_batch_serves_every_sample_once_in_order(volume) -> None:
    n, rng = 50, random.Random(3)
    directory = volume(n)
    order = numbers(DataLoader(Numbers(UCVolumeDataset(directory, shuffle=True, seed=9)), batch_size=5, num_workers=0))
    for _ in range(5):
        served, state = [], None
        while state is None or (state["epoch"] == 0 and state["samples_served"] < n):
            world, workers, batch = rng.randint(1, 3), rng.choice([0, 0, 1, 2]), rng.randint(1, 4)
            steps = rng.randint(1, 4)
            states, shares = [], []
            for rank in range(world):
                source = UCVolumeDataset(directory, shuffle=True, seed=9, rank=rank, world_size=world)
                loader = DataLoader(Numbers(source), batch_size=batch, num_workers=workers)
                if state is not None:
                    loader.load_state_dict(state)
                shares.append([batch.tolist() for batch in itertools.islice(iter(loader), steps)])
                states.append(loader.state_dict())
            if all(len(share) == len(shares[0]) for share in shares):
                assert all(state == states[0] for state in states)  # any single copy restores every world
            state = states[0]
            served += [x for step in itertools.zip_longest(*shares, fillvalue=[]) for got in step for x in got]
        assert served == order


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_behind_any_wrapper_resume_is_exact_on_the_same_topology(volume, wrapper, workers) -> None:
    directory = volume(17)

    def loader() -> DataLoader:
        source = UCVolumeDataset(directory, shuffle=True, seed=2, rank=0, world_size=1)
        return DataLoader(wrapper(source), batch_size=2, num_workers=workers)

    whole = numbers(loader())
    steps = len(list(loader()))
    for step in range(steps + 1):
        if workers and step % 3:
            continue  # starting workers takes time, and the places are the same
        running = loader()
        iterator = iter(running)
        before = some(iterator, step)
        state = json.loads(json.dumps(running.state_dict()))
        resumed = loader()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        # A second stop on the way, so that a position saved after a resume is right too.
        iterator = iter(resumed)
        between = some(iterator, 2)
        again = loader()
        again.load_state_dict(resumed.state_dict())
        rest = numbers(again) if resumed.state_dict()["epoch"] == 0 else []
        assert before + between + rest == whole, (step, state)
        assert (again.state_dict()["epoch"], again.state_dict()["source"]) == (1, "")


def test_behind_a_filter_another_topology_is_refused_and_told_what_to_do(volume) -> None:
    directory = volume(17)
    running = DataLoader(Odd(UCVolumeDataset(directory)), batch_size=2, num_workers=2)
    some(iter(running), 3)
    state = running.state_dict()
    assert state["source"] != ""
    for other in (
        DataLoader(Odd(UCVolumeDataset(directory)), batch_size=2, num_workers=1),
        DataLoader(Odd(UCVolumeDataset(directory)), batch_size=3, num_workers=2),
        DataLoader(Odd(UCVolumeDataset(directory, rank=1, world_size=2)), batch_size=2, num_workers=2),
    ):
        other.load_state_dict(state)
        with pytest.raises(StateError, match="same topology"):
            iter(other)
        other.load_state_dict({**state, "source": ""})
        assert list(other)


def test_a_decoder_that_makes_one_of_one_stays_elastic(volume) -> None:
    directory = volume(12)
    running = DataLoader(Numbers(UCVolumeDataset(directory)), batch_size=2, num_workers=2)
    iterator = iter(running)
    for received in range(1, 7):
        next(iterator)
        assert running.state_dict()["source"] == ""
        assert running.state_dict()["samples_served"] == received * 2


def test_the_position_of_the_dataset_is_that_of_its_loader(volume) -> None:
    source = UCVolumeDataset(volume(12))
    loader = DataLoader(source, batch_size=5, num_workers=1)
    next(iter(loader))
    assert source.state_dict() == loader.state_dict()
    assert source.state_dict()["samples_served"] == 5


def test_a_checkpoint_of_dcp_carries_the_position_to_other_loaders(volume, tmp_path) -> None:
    directory = volume(12)

    def loader(batch: int, workers: int) -> DataLoader:
        return DataLoader(Numbers(UCVolumeDataset(directory, shuffle=True)), batch_size=batch, num_workers=workers)

    whole = numbers(loader(4, 0))
    running = loader(4, 1)
    before = some(iter(running), 2)
    dcp.save({"loader": running, "weight": torch.ones(2)}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    resumed = loader(3, 2)
    dcp.load({"loader": resumed, "weight": torch.zeros(2)}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert before + numbers(resumed) == whole


def test_resume_reads_nothing_of_what_was_passed(volume) -> None:
    directory = volume(40)
    dataset = UCVolumeDataset(directory, shuffle=True)
    dataset.load_state_dict({**dataset.state_dict(), "samples_served": 36})
    loader = DataLoader(dataset, batch_size=2, num_workers=0)
    assert len(list(loader)) == 2
    assert loader.stats().files.files == 4


# --- the values behind it ---

places = st.builds(Place, st.integers(0, 5), st.integers(0, 50), st.integers(0, 9))
starts = st.builds(
    Start,
    epoch=st.integers(0, 9),
    base=st.integers(0, 2**40),
    rank=st.just(0),
    world_size=st.integers(1, 4),
    local_world_size=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    uneven=st.sampled_from(UNEVEN),
    keep=st.integers(0, 99),
    turn=st.integers(0, 5),
    nodes=st.integers(1, 3),
    groups=st.integers(1, 9),
    places=st.lists(places, min_size=1, max_size=5).map(tuple),
)


@given(starts)
def test_a_start_survives_shared_memory(start) -> None:
    assert Start.unpack(torch.tensor(start.pack()).tolist()) == start
    assert sorted(start.role(worker) for worker in range(start.workers)) == list(range(start.workers))


@given(starts, st.lists(places, min_size=5, max_size=5), st.integers(0, 5))
def test_places_saved_on_a_topology_come_back_on_it(start, saved, turn) -> None:
    saved = saved[: start.workers]
    resumed = resume_source(pack_source(start, saved, turn), start)
    assert (resumed.places, resumed.turn, resumed.base) == (tuple(saved), turn, start.base)


@given(
    n=st.integers(0, 60),
    base=st.integers(0, 60),
    batch=st.integers(1, 5),
    workers=st.integers(1, 4),
    world=st.integers(1, 3),
)
def test_batches_that_come_as_dealt_are_counted_by_one_integer(n, base, batch, workers, world) -> None:
    start = Start(0, min(base, n), 0, world, 1, batch, "keep", 0, (Place(0),) * workers)
    received = Received([start], [n])
    schedule, passed = start.schedule(n), [0] * workers
    for step in range(schedule.batches(0)):
        assert received.position() == (schedule.served(step), "")
        role = step % workers
        passed[role] += len(schedule.span(step, 0))
        received.add(Report(role, (Place(0, passed[role]),)))
    assert received.position() == (schedule.served(schedule.batches(0)), "")
    if schedule.batches(0):
        received.add(Report(0, (Place(0, passed[0] + 1),)))
        assert received.position()[1] != ""


@given(st.integers(0, 2**63), st.integers(0, 1), st.integers(0, 99), st.integers(0, 10**12), st.text(max_size=5))
def test_a_state_is_read_back_as_it_was_written(seed, shuffle, epoch, served, manifest) -> None:
    state = State(seed, shuffle, epoch, served, 10**12, manifest)
    assert State.from_dict(json.loads(json.dumps(state.to_dict()))) == state
