"""Datasets around several sources, and those that read more than one file for more than one sample: exact resume."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import ChainDataset, Dataset, IterableDataset

from airdata import DataLoader, UCVolumeDataset
from airdata.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*ranks get one batch less")


class Numbers(IterableDataset):
    """Decodes: one sample from each file, which also says how many files the volume has."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self):
        for path in self.source:
            yield int(path.split("volume")[1].split("/")[0]) * 1000 + int(os.path.basename(path)[4:9])


class Thrice(Numbers):
    """Makes three of each."""

    def __iter__(self):
        for number in super().__iter__():
            yield from (number * 10 + part for part in range(3))


class Windows(Numbers):
    """Makes three samples of every two files, once it has read both."""

    def __iter__(self):
        numbers = super().__iter__()
        for first in numbers:
            second = next(numbers, 0)
            yield from (first * 10000 + second, first, second)


class Odd(Numbers):
    """Drops about half."""

    def __iter__(self):
        return (number for number in super().__iter__() if number % 2)


class Batched(IterableDataset):
    """Makes the batches itself."""

    def __init__(self, source) -> None:
        self.inner = Numbers(source)

    def __iter__(self):
        numbers = iter(self.inner)
        while batch := list(itertools.islice(numbers, 3)):
            yield batch


class Pairs(IterableDataset):
    """Reads two sources side by side."""

    def __init__(self, first, second) -> None:
        self.parts = [Numbers(first), Numbers(second)]

    def __iter__(self):
        yield from (a * 1_000_000 + b for a, b in zip(*self.parts, strict=False))


class OneAndTwo(IterableDataset):
    """One sample of one file of the first and two of the second."""

    def __init__(self, first, second) -> None:
        self.first, self.second = Numbers(first), Numbers(second)

    def __iter__(self):
        second = iter(self.second)
        for number in self.first:
            yield number + sum(itertools.islice(second, 2))


def chain(*parts) -> ChainDataset:
    return ChainDataset(list(parts))


TWO_SOURCES = {
    "chain": lambda a, b: chain(Numbers(a), Numbers(b)),
    "chain of an expander and a filter": lambda a, b: chain(Thrice(a), Odd(b)),
    "chain of bare sources": chain,
    "pairs": Pairs,
    "one and two": OneAndTwo,
}


@pytest.fixture
def two(volume) -> tuple[str, str]:
    """Directories of 12 and of 8 files."""
    return volume(12), volume(8)


def flat(batches) -> list:
    return [x for batch in batches for x in (batch.tolist() if isinstance(batch, torch.Tensor) else batch)]


def some(iterator, count: int) -> list:
    return flat(itertools.islice(iterator, count))


def epoch_of(loader: DataLoader) -> int:
    return loader.sources[0].epoch


def check_resume(make, workers: int) -> None:
    """Stop at every few steps, go on, stop again on the way, go on: it is the epoch."""
    whole = flat(make())
    steps = len(list(make()))
    for step in range(0, steps + 1, 4 if workers else 1):
        running = make()
        before = some(iter(running), step)
        state = json.loads(json.dumps(running.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        between = some(iter(resumed), 2)
        again = make()
        again.load_state_dict(resumed.state_dict())
        assert before + between + (flat(again) if epoch_of(again) == 0 else []) == whole, (step, state)


@pytest.mark.parametrize("workers", [0, 2])
def test_behind_a_wrapper_that_makes_several_samples_of_several_files_resume_is_exact(volume, workers) -> None:
    directory = volume(13)

    def make() -> DataLoader:
        source = UCVolumeDataset(directory, shuffle=True, seed=2)
        return DataLoader(Windows(source), batch_size=2, num_workers=workers)

    check_resume(make, workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", TWO_SOURCES)
def test_behind_wrappers_of_several_sources_resume_is_exact_on_the_same_topology(two, name, workers) -> None:
    def make() -> DataLoader:
        sources = [UCVolumeDataset(one, shuffle=True, seed=seed) for seed, one in enumerate(two)]
        return DataLoader(TWO_SOURCES[name](*sources), batch_size=2, num_workers=workers)

    check_resume(make, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_a_dataset_makes_itself_resume_exactly(volume, workers) -> None:
    directory = volume(20)

    def make() -> DataLoader:
        return DataLoader(Batched(UCVolumeDataset(directory, shuffle=True)), batch_size=None, num_workers=workers)

    check_resume(make, workers)


def chained(two, *, workers: int, batch: int = 2, rank: int = 0, world: int = 1) -> DataLoader:
    options = {"shuffle": True, "seed": 3, "rank": rank, "world_size": world}
    sources = [Numbers(UCVolumeDataset(directory, **options)) for directory in two]
    return DataLoader(chain(*sources), batch_size=batch, num_workers=workers)


def test_in_the_first_dataset_of_a_chain_any_topology_can_go_on(two) -> None:
    running = chained(two, workers=2)
    before = some(iter(running), 3)
    state = running.state_dict()
    assert [state[name]["source"] for name in ("source_0", "source_1")] == ["", ""]
    ranks = []
    for rank in range(2):
        loader = chained(two, workers=0, batch=3, rank=rank, world=2)
        loader.load_state_dict(state)
        ranks.append(flat(loader))
    assert sorted(before + ranks[0] + ranks[1]) == sorted(flat(chained(two, workers=0)))


def test_later_in_a_chain_another_topology_is_refused_and_told_what_to_do(two) -> None:
    running = chained(two, workers=2)
    some(iter(running), 8)
    state = running.state_dict()
    assert state["source_1"]["source"] != ""
    for options in ({"workers": 1}, {"workers": 2, "batch": 3}, {"workers": 2, "rank": 1, "world": 2}):
        loader = chained(two, **options)
        loader.load_state_dict(state)
        with pytest.raises(StateError, match=r"several datasets one after the other.*was \d and is \d.*same topology"):
            iter(loader)


def test_between_epochs_any_topology_can_go_on(two) -> None:
    running = chained(two, workers=2)
    list(running)
    loader = chained(two, workers=0, batch=5)
    loader.load_state_dict(running.state_dict())
    expected = chained(two, workers=0, batch=5)
    expected.set_epoch(1)
    assert flat(loader) == flat(expected)


def test_a_state_of_other_datasets_is_refused(two) -> None:
    both = chained(two, workers=0)
    one = DataLoader(UCVolumeDataset(two[0], shuffle=True, seed=3), num_workers=0)
    with pytest.raises(StateError, match="reads 2 datasets"):
        both.load_state_dict(one.state_dict())
    with pytest.raises(StateError, match="version None"):
        one.load_state_dict(both.state_dict())
    with pytest.raises(StateError, match="number of files"):
        chained(two[::-1], workers=0).load_state_dict(both.state_dict())


def test_positions_of_different_moments_are_not_put_together(two) -> None:
    running = chained(two, workers=2)
    iterator = iter(running)
    some(iterator, 8)
    early = running.state_dict()
    some(iterator, 1)
    late = running.state_dict()
    loader = chained(two, workers=2)
    loader.load_state_dict({"source_0": early["source_0"], "source_1": late["source_1"]})
    with pytest.raises(StateError, match="same time"):
        iter(loader)


def test_a_checkpoint_of_dcp_carries_the_positions_of_several_sources(two, tmp_path) -> None:
    running = chained(two, workers=0)
    before = some(iter(running), 8)
    dcp.save({"loader": running}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    resumed = chained(two, workers=0)
    dcp.load({"loader": resumed}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert before + flat(resumed) == flat(chained(two, workers=0))


def test_ranks_share_several_sources_and_each_file_is_read_once(two) -> None:
    ranks = [flat(chained(two, workers=2, rank=rank, world=3)) for rank in range(3)]
    assert sorted(itertools.chain(*ranks)) == sorted(flat(chained(two, workers=0)))


def test_what_was_read_of_each_source_is_counted_there(two) -> None:
    sources = [UCVolumeDataset(directory) for directory in two]
    loader = DataLoader(chain(*sources), batch_size=4, num_workers=2)
    list(loader)
    assert [source.stats().files for source in sources] == [12, 8]
    assert loader.stats().files.files == 20


def test_a_map_style_dataset_that_knows_a_source_works_as_with_pytorch(volume) -> None:
    class ByIndex(Dataset):
        def __init__(self, source) -> None:
            self.source = source

        def __len__(self) -> int:
            return len(self.source.manifest)

        def __getitem__(self, row: int) -> str:
            return self.source.manifest[row].path

    loader = DataLoader(ByIndex(UCVolumeDataset(volume(7))), batch_size=3, shuffle=True, num_workers=0)
    assert len(set(flat(loader))) == 7
    with pytest.raises(StateError, match="no UCVolumeDataset"):
        loader.state_dict()


def test_workers_of_any_start_method_read_chains_mixtures_and_groups_and_resume(program, finish, two) -> None:
    code = """
        import itertools, json, sys
        from torch.utils.data import ChainDataset
        from airdata import DataLoader, UCVolumeDataset

        if __name__ == "__main__":
            def loader(method):
                mixed = UCVolumeDataset(sys.argv[1:], weights=[1, 3], shuffle=True, seed=1)
                grouped = UCVolumeDataset(sys.argv[1], shuffle=True, shuffle_scope="group", groups=3)
                workers = 1 if method else 0
                data = ChainDataset([mixed, grouped])
                return DataLoader(data, batch_size=3, num_workers=workers, multiprocessing_context=method)
            flat = lambda batches: [path for batch in batches for path in batch]
            running, resumed = loader("spawn"), loader("forkserver")
            first = flat(itertools.islice(iter(running), 8))
            resumed.load_state_dict(running.state_dict())
            print(json.dumps([first + flat(resumed), flat(loader(None))]))
    """
    resumed, whole = json.loads(finish(program(code, *two)))
    assert len(whole) == 20 + 12
    assert resumed == whole
