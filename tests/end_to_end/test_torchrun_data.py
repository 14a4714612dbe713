"""Data under real torchrun workers: exact cover, elastic resume over world sizes, and ranks that disagree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from airdata import UCVolumeDataset

pytestmark = pytest.mark.timeout(600)

JOB = """
import datetime, json, os, sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from airdata import DataLoader, UCVolumeDataset
from airdata.errors import TopologyError

what, volume, out = sys.argv[1:4]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def write(value):
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(value, file)

def read(loader, steps=None):
    batches = []
    for batch in loader:
        batches.append([os.path.basename(path) for path in batch])
        if len(batches) == steps:
            break
    return batches

def elastic(steps, batch_size, workers, group):
    if group:
        dist.init_process_group("gloo")
    dataset = UCVolumeDataset(volume, shuffle=True, seed=5)
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers)
    if os.path.exists(f"{out}/state.json"):
        loader.load_state_dict(json.load(open(f"{out}/state.json")))
    batches = read(loader, steps)
    write({"batches": batches, "state": loader.state_dict(), "next": read(loader) if steps is None else []})

def disagree():
    dist.init_process_group("gloo")
    odd = rank == world - 1
    said = {}
    for name in ("the manifest", "seed", "num_workers", "batch_size", "epoch"):
        pattern = "class0/*" if odd and name == "the manifest" else None
        dataset = UCVolumeDataset(volume, pattern=pattern, shuffle=True, seed=int(odd and name == "seed"))
        loader = DataLoader(
            dataset, batch_size=2 + (odd and name == "batch_size"), num_workers=1 + (odd and name == "num_workers")
        )
        loader.set_epoch(7 if odd and name == "epoch" else 0)
        try:
            said[name] = f"no error, and {len(read(loader))} batches"
        except TopologyError as error:
            said[name] = str(error)
    write(said)

def leave():
    # Not by a barrier: a rank that leaves a gloo group can reset the connection of one that is still in it.
    if dist.is_initialized():
        store = c10d._get_default_store()
        store.set(f"left/{rank}", "")
        if rank == 0:
            store.wait([f"left/{peer}" for peer in range(world)], datetime.timedelta(seconds=120))
    os._exit(0)

if __name__ == "__main__":
    disagree() if what == "disagree" else elastic(**json.loads(what))
    leave()
"""


@pytest.fixture
def torchrun(make_files, tmp_path):
    """Run the job under torchrun; what each rank wrote."""
    volume, out, script = tmp_path / "volume", tmp_path / "out", tmp_path / "job.py"
    make_files(volume, 97)
    out.mkdir()
    script.write_text(textwrap.dedent(JOB))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(ranks: int, what: str) -> list:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run(
            [*command, str(script), what, str(volume), str(out)],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]

    run.volume, run.out = volume, out
    return run


def served(ranks: list[list[list[str]]]) -> list[str]:
    """The samples of all ranks, step by step and in a step by rank."""
    steps = max(map(len, ranks))
    return [name for step in range(steps) for batches in ranks for batch in batches[step : step + 1] for name in batch]


def test_an_epoch_goes_on_from_one_rank_to_four_to_two_to_three(torchrun) -> None:
    expected = UCVolumeDataset(str(torchrun.volume), shuffle=True, seed=5)
    orders = [[os.path.basename(path) for path in expected] for _ in range(2)]
    got: list[str] = []
    phases = [  # ranks, steps, batch size, workers, whether there is a process group or only the environment
        (1, 3, 5, 2, True),
        (4, 2, 3, 1, True),
        (2, 4, 2, 0, False),
        (3, None, 4, 2, True),
    ]
    for ranks, steps, batch_size, workers, group in phases:
        what = {"steps": steps, "batch_size": batch_size, "workers": workers, "group": group}
        written = torchrun(ranks, json.dumps(what))
        got += served([one["batches"] for one in written])
        assert [one["state"] for one in written] == [written[0]["state"]] * ranks
        assert written[0]["state"]["samples_served"] == (0 if steps is None else len(got))
        Path(torchrun.out, "state.json").write_text(json.dumps(written[0]["state"]))
    assert got == orders[0]  # every file once, in the order of the epoch, whoever read it
    assert served([one["next"] for one in written]) == orders[1]


def test_ranks_that_disagree_get_one_error_with_both_sides_and_nobody_hangs(torchrun) -> None:
    first, second, third = torchrun(3, "disagree")
    assert first == second == third
    for what, (ours, theirs) in {
        "seed": ("0", "1"),
        "num_workers": ("1", "2"),
        "batch_size": ("2", "3"),
        "epoch": ("0", "7"),
    }.items():
        assert f"{what} is {ours} on rank 0, 1 and {theirs} on rank 2" in first[what]
    assert "the manifest is '" in first["the manifest"]
    assert "the number of files is 97 on rank 0, 1 and 33 on rank 2" in first["the manifest"]
