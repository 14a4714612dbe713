"""Checkpoints of one release of torch, loaded by another: set AIRDATA_OTHER_PYTHON to a Python that has one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import airdata

OTHER = os.environ.get("AIRDATA_OTHER_PYTHON")

# Runs in either Python: "save" writes each kind of checkpoint, "load" reads each with every reader there is.
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from airdata.checkpoint import CheckpointManager, RNGState, UCVolumeReader, UCVolumeWriter
what, root = sys.argv[1:]

def content(scale):
    numbers = torch.arange(6000.) * scale
    kinds = "float32 float64 bfloat16 float16 float8_e4m3fn int64 uint8 bool complex64".split()
    return {
        **{kind: (numbers % 100).to(getattr(torch, kind)).view(60, 100) for kind in kinds},
        "scalar": torch.tensor(2.5 * scale), "empty": torch.zeros(0, 3), "columns": numbers.view(60, 100).t(),
        "nested": {"list": [numbers[:3].clone(), {"deep": numbers[3:5].clone()}], "number": 7 * scale, "text": "x" * scale},
    }

def job(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    with torch.no_grad():
        model.weight.copy_(torch.arange(600.).view(20, 30))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
    return model, optimizer

def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*raw)
    return left == right

if what == "save":
    dcp.save(content(1), storage_writer=UCVolumeWriter(root + "/ours"), no_dist=True)
    dcp.save(content(1), storage_writer=FileSystemWriter(root + "/stock"), no_dist=True)
    model, optimizer = job(3)
    with CheckpointManager(root + "/steps") as manager:
        manager.save(3, {"model": model, "optimizer": optimizer, "rng": RNGState(), "epoch": 5})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, root + "/expected.pt")
else:
    for kind in ("ours", "stock"):
        for reader in (UCVolumeReader, FileSystemReader):
            target = content(0)
            dcp.load(target, storage_reader=reader(f"{root}/{kind}"), no_dist=True)
            assert same(target, content(1)), (kind, reader)
    model, optimizer = job(0)
    state = {"model": model, "optimizer": optimizer, "rng": RNGState(), "epoch": 0}
    assert CheckpointManager(root + "/steps").restore(state) == 3
    expected = torch.load(root + "/expected.pt")
    assert same(dict(model.state_dict()), dict(expected["model"])) and state["epoch"] == 5
    assert same(optimizer.state_dict()["state"], expected["optimizer"]["state"])
print(torch.__version__)
"""


def run(python, what, root):
    source = Path(airdata.__file__).parents[1]
    done = subprocess.run(
        [python, "-c", PROGRAM, what, str(root)],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.skipif(not OTHER, reason="needs AIRDATA_OTHER_PYTHON, a Python with another release of torch")
@pytest.mark.parametrize("direction", ["from the other", "to the other"])
def test_another_release_of_torch_loads_the_same_bits(direction, tmp_path):
    saver, loader = (OTHER, sys.executable) if direction == "from the other" else (sys.executable, OTHER)
    assert run(saver, "save", tmp_path) != run(loader, "load", tmp_path)
