"""Whatever starts the ranks, each file is read once, and in the same order: launchers run a small script for real."""

from __future__ import annotations

import importlib.util
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
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from airdata import DataLoader, UCVolumeDataset
from airdata.topology import Topology

launcher, volume, out = sys.argv[1:4]

def make_loader():
    return DataLoader(UCVolumeDataset(volume, shuffle=True, seed=5), batch_size=3, num_workers=1)

def write(batches, out):
    # A function may be sent to its ranks by value, and so may this.
    import json, os
    from airdata.topology import Topology
    names = [[os.path.basename(path) for path in batch] for batch in batches]
    with open(f"{out}/{Topology.current().rank}.json", "w") as file:
        json.dump(names, file)

def leave():
    if dist.is_initialized():
        store, rank, world = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        store.set(f"left/{rank}", "")
        if rank == 0:
            store.wait([f"left/{peer}" for peer in range(world)], datetime.timedelta(seconds=120))
    os._exit(0)

def plain():
    write(list(make_loader()), out)

def accelerate():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    write(list(accelerator.prepare(make_loader())), out)
    leave()

def airdist():
    from airdist import distributed

    @distributed(num_accelerators=2, tracking=False, logs="none", timeout=200)
    def train():
        torch.distributed.init_process_group("gloo")
        write(list(make_loader()), out)

    train.distributed()

def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batches = torch.nn.Linear(1, 1), []

        def training_step(self, batch):
            self.batches.append(batch)
            return self.model(torch.ones(1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, make_loader())
    write(module.batches, out)
    leave()

if __name__ == "__main__":
    globals()[launcher]()
"""


def needs(module: str):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


@pytest.fixture
def launch(make_files, tmp_path):
    """Run the script; what each rank read."""
    volume, out, script = tmp_path / "volume", tmp_path / "out", tmp_path / "job.py"
    make_files(volume, 24)  # whole steps of two ranks: Lightning stops all ranks with the first that has no more
    out.mkdir()
    script.write_text(textwrap.dedent(JOB))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}

    def run(launcher: str, *command: str) -> list[list[list[str]]]:
        done = subprocess.run(
            [sys.executable, *command, str(script), launcher, str(volume), str(out)],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(file.read_text()) for file in sorted(Path(out).iterdir())]

    run.order = lambda: [os.path.basename(path) for path in UCVolumeDataset(str(volume), shuffle=True, seed=5)]
    return run


@pytest.mark.parametrize(
    ("launcher", "command", "ranks"),
    [
        ("plain", [], 1),
        ("airdist", [], 2),
        pytest.param(
            "accelerate",
            ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"],
            2,
            marks=needs("accelerate"),
        ),
        pytest.param("lightning", [], 2, marks=needs("lightning")),
    ],
)  # fmt: skip
def test_every_launcher_gives_every_file_once_in_the_same_order(launch, launcher, command, ranks) -> None:
    read = launch(launcher, *command)
    assert len(read) == ranks
    steps = zip(*read, strict=True)
    assert [name for step in steps for batch in step for name in batch] == launch.order()
