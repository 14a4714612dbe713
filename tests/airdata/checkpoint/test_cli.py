import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from airdata.checkpoint import CheckpointManager
from airdata.cli import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:checkpoints under"),
]


@pytest.fixture
def root(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.ones(20, 30), "epoch": step})
    return tmp_path


def test_ls_tells_valid_steps_from_damaged_ones(root, capsys):
    assert main(["ckpt", "ls", str(root)]) == 0
    assert capsys.readouterr().out.count("valid ") == 3
    next((root / "step-00000002").glob("*.distcp")).unlink()
    dcp.save({"x": torch.ones(1)}, storage_writer=FileSystemWriter(root / "step-00000004"))
    assert main(["ckpt", "ls", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "valid"], ["2", "DAMAGED"], ["3", "valid"], ["4", "valid"]]
    assert "is missing" in lines[1]
    assert "no digests" in lines[3]


def test_show_lists_what_is_inside(root, capsys):
    assert main(["ckpt", "show", f"{root}/step-00000001"]) == 0
    out = capsys.readouterr().out
    assert "weight  float32 [20, 30], 1 shards" in out
    assert "epoch  object" in out
    assert main(["ckpt", "show", f"{root}/step-00000001", "--limit", "1"]) == 0
    assert "and 1 more" in capsys.readouterr().out


def test_verify_names_the_damaged_file(root, capsys, flip):
    assert main(["ckpt", "verify", f"{root}/step-00000001"]) == 0
    assert "all as saved" in capsys.readouterr().out
    shard = next((root / "step-00000001").glob("*.distcp"))
    flip(shard, 1000)
    assert main(["ckpt", "verify", f"{root}/step-00000001"]) == 1
    assert shard.name in capsys.readouterr().err


def test_prune_first_says_and_then_does(root, capsys):
    assert main(["ckpt", "prune", str(root), "--keep-last", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would remove 2 of 3 steps: 1, 2\n"
    assert main(["ckpt", "prune", str(root), "--keep-last", "1", "--keep-every", "2"]) == 0
    assert capsys.readouterr().out == "removed 1 of 3 steps: 1\n"
    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000003"]


def test_prune_keeps_the_best_and_the_pinned(tmp_path, capsys):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        for step, score in enumerate([0.5, 0.9, 0.1, 0.3]):
            manager.save(step, {"x": step}, metrics={"score": score})
    options = ["--keep-last", "1", "--dry-run", "--pin", "0"]
    assert main(["ckpt", "prune", str(tmp_path), *options, "--keep-best", "score"]) == 0
    assert main(["ckpt", "prune", str(tmp_path), *options, "--keep-best", "score:max"]) == 0
    assert capsys.readouterr().out.splitlines() == ["would remove 1 of 4 steps: 1", "would remove 1 of 4 steps: 2"]


def test_what_is_not_there_is_an_error_in_one_line(tmp_path, capsys):
    assert main(["ckpt", "show", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("airdata: ")
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert capsys.readouterr().out.count("no step is published") == 2
    assert main(["ckpt", "ls", "s3:/mangled"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ckpt"],
        ["ckpt", "prune", "x"],
        ["ckpt", "prune", "x", "--keep-last", "0"],
        ["ckpt", "prune", "x", "--keep-last", "1", "--keep-best", "loss:best"],
        ["ckpt", "ls", "x", "--storage-options", "[1]"],
    ],
)
def test_a_wrong_command_line_is_told_so(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_it_reaches_a_store_with_options(s3_volume, capsys):
    import json

    CheckpointManager(s3_volume, async_save=False).save(5, {"x": torch.ones(3)})
    options = ["--storage-options", json.dumps(dict(s3_volume.storage_options))]
    assert main(["ckpt", "ls", s3_volume.url, *options]) == 0
    assert "valid" in capsys.readouterr().out
    assert main(["ckpt", "verify", f"{s3_volume.url}/step-00000005", *options]) == 0


def test_help_needs_no_torch():
    program = "import sys; from airdata.cli import _parser; _parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
