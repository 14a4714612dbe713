"""Loader, manager and launcher together: positions travel through checkpoints onto the same and other numbers of ranks."""

from __future__ import annotations

import os

import pytest
from torch.utils.data import IterableDataset

from airdata.errors import StateError
from airdist import distributed


class Numbers(IterableDataset):
    """The number in each file's name; with ``even``, a wrapper that drops the odd ones."""

    def __init__(self, files, *, even: bool) -> None:
        self.files = files
        self.even = even

    def __iter__(self):
        for path in self.files:
            number = int(os.path.basename(path)[4:9])
            if not self.even or number % 2 == 0:
                yield number


@pytest.fixture
def job(make_files, tmp_path, monkeypatch):
    """Train for some steps from wherever the checkpoint says; every rank's batches come back."""
    make_files(tmp_path / "volume", 40)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    @distributed(tracking=False, logs="none", timeout=150)
    def train(volume, root, steps, even):
        import torch.distributed as dist

        import airdata

        dist.init_process_group("gloo")
        files = airdata.UCVolumeDataset(volume, shuffle=True, seed=3)
        loader = airdata.DataLoader(Numbers(files, even=even), batch_size=4 // dist.get_world_size(), num_workers=1)
        state = {"loader": loader}
        with airdata.CheckpointManager(root, async_save=False, prove_first=False) as manager:
            start = manager.restore(state) or 0
            batches = []
            for batch in loader:
                batches.append(batch.tolist())
                if len(batches) == steps:
                    manager.save(start + steps, state)
                    break
        dist.destroy_process_group()
        return batches

    def run(ranks: int, steps: int | None, *, even: bool = False) -> list[int]:
        launch = train.with_overrides(num_accelerators=ranks)
        results = launch.distributed(str(tmp_path / "volume"), str(tmp_path / "steps"), steps, even)
        return [number for batches in results for batch in batches for number in batch]

    return run


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 1), (1, 2)])
def test_an_epoch_goes_on_from_a_checkpoint_on_any_number_of_ranks(job, first, second):
    before = job(first, 3)
    after = job(second, None)
    assert len(before) == 12
    assert sorted(before + after) == list(range(40))


def test_behind_a_filter_every_rank_takes_up_its_own_position(job):
    before = job(2, 2, even=True)
    after = job(2, None, even=True)
    assert sorted(before + after) == list(range(0, 40, 2))


def test_behind_a_filter_another_number_of_ranks_is_refused(job):
    job(2, 2, even=True)
    with pytest.raises(StateError, match="world_size was 2 and is 1"):
        job(1, None, even=True)
