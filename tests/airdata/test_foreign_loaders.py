"""Positions kept by a loader that is not ours: torchdata's, which asks each worker where it stands."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch.utils.data
from torch.utils.data import IterableDataset

from airdata import UCVolumeDataset
from airdata.errors import StateError

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata").StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*ranks get one batch less")


def names(batches) -> list[str]:
    return [os.path.basename(path) for batch in batches for path in batch]


class Decode(IterableDataset):
    """A wrapper that hands the position of its source on, as torchdata asks it to."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self):
        for path in self.source:
            yield os.path.basename(path)

    def state_dict(self) -> dict:
        return self.source.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.source.load_state_dict(state)


@pytest.mark.parametrize("wrap", [lambda source: source, Decode], ids=["bare", "wrapped"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_torchdatas_loader_resumes_from_every_step(volume, workers, wrap) -> None:
    directory = volume(17)

    def loader(epoch: int = 0):
        dataset = UCVolumeDataset(directory, shuffle=True, seed=6)
        dataset.set_epoch(epoch)
        return StatefulDataLoader(wrap(dataset), batch_size=3, num_workers=workers)

    whole, steps = names(loader(epoch=1)), len(list(loader()))
    for step in range(0, steps, 4 if workers else 1):
        running = loader(epoch=1)
        before = names(itertools.islice(iter(running), step)) if step else []
        state = json.loads(json.dumps(running.state_dict())) if workers == 0 else running.state_dict()
        resumed = loader()  # the state says which epoch
        resumed.load_state_dict(state)
        # A second stop on the way.
        iterator = iter(resumed)
        between = names(itertools.islice(iterator, 1))
        again = loader()
        again.load_state_dict(resumed.state_dict())
        assert before + between + names(again) == whole, step


def test_nothing_that_was_passed_is_read_again(volume) -> None:
    directory = volume(24)
    dataset = UCVolumeDataset(directory)
    manifest = dataset.manifest
    running = StatefulDataLoader(dataset, batch_size=2, num_workers=2)
    passed = names(itertools.islice(iter(running), 6))
    state = running.state_dict()
    for path in UCVolumeDataset(directory):
        if os.path.basename(path) in passed:
            os.truncate(path, 0)
    dataset = UCVolumeDataset(directory, manifest=manifest, yields="bytes")
    resumed = StatefulDataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list)
    resumed.load_state_dict(state)
    rest = [content for batch in resumed for content in batch]
    assert len(rest) == 12
    assert all(rest)


def test_the_position_of_a_worker_is_taken_up_by_no_other(volume) -> None:
    directory = volume(12)
    running = StatefulDataLoader(UCVolumeDataset(directory), batch_size=2, num_workers=2)
    next(iter(running))
    snapshot = json.dumps(running.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"], default=str)
    state = json.loads(snapshot)["dataset_state"] or json.loads(snapshot)["fetcher_state"]["dataset_iter_state"]
    assert json.loads(state["source"])["worker"] == 0
    dataset = UCVolumeDataset(directory)
    dataset.load_state_dict(state)
    with pytest.raises(StateError, match="worker was 0 and is None"):
        iter(dataset)


def test_persistent_workers_of_torchdatas_loader_read_whole_epochs_after_a_resumed_one(volume) -> None:
    directory = volume(12)
    running = StatefulDataLoader(UCVolumeDataset(directory), batch_size=2, num_workers=2)
    before = names(itertools.islice(iter(running), 2))
    resumed = StatefulDataLoader(UCVolumeDataset(directory), batch_size=2, num_workers=2, persistent_workers=True)
    resumed.load_state_dict(running.state_dict())
    rest = names(resumed)
    assert sorted(before + rest) == sorted(names(resumed)) == sorted(names([UCVolumeDataset(directory)]))


def test_a_position_that_workers_of_pytorchs_loader_have_cannot_be_asked_for(volume) -> None:
    dataset = UCVolumeDataset(volume(6))
    list(torch.utils.data.DataLoader(dataset, num_workers=1))
    with pytest.raises(StateError, match=r"airdata\.DataLoader"):
        dataset.state_dict()
    dataset.load_state_dict(UCVolumeDataset(dataset.files.volumes[0]).state_dict())
    assert dataset.state_dict()["samples_served"] == 0
