import importlib.util

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from airdata.checkpoint import CheckpointManager, RNGState, UCVolumeReader, UCVolumeWriter
from airdata.checkpoint.convert import export_file, import_file
from airdata.cli import main
from airdata.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from airdata.volume import Volume

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:checkpoints under"),
]
needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed"
)


@pytest.fixture
def saved(tmp_path, make_state):
    state = make_state(3)
    dcp.save(state, storage_writer=UCVolumeWriter(tmp_path / "saved"))
    return Volume.of(tmp_path / "saved"), state


def test_a_checkpoint_becomes_a_file_of_torch_save_and_comes_back(saved, tmp_path, make_state, assert_same):
    checkpoint, state = saved
    counted = []
    assert export_file(checkpoint, str(tmp_path / "one.pt"), progress=counted.append) == []
    assert_same(torch.load(tmp_path / "one.pt"), state)
    assert sum(counted) > 300 * 200 * 4
    counted.clear()
    import_file(str(tmp_path / "one.pt"), Volume.of(tmp_path / "again"), progress=counted.append)
    assert sum(counted) > 300 * 200 * 4
    target = make_state(None)
    dcp.load(target, storage_reader=UCVolumeReader(tmp_path / "again"))
    assert_same(target, state)
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_a_step_of_a_manager_survives_the_way_through_a_file(tmp_path, assert_same):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": RNGState(), "epoch": 7, "names": ["a", "b"]}
    CheckpointManager(tmp_path / "run", async_save=False).save(5, state)
    export_file(Volume.of(tmp_path / "run/step-00000005"), str(tmp_path / "weights.pt"), below="model")
    assert_same(torch.load(tmp_path / "weights.pt"), dict(model.state_dict()))
    # The state of numpy's generator is nothing that a file of plain values may hold.
    del state["rng"]
    CheckpointManager(tmp_path / "run", async_save=False).save(6, state)
    export_file(Volume.of(tmp_path / "run/step-00000006"), str(tmp_path / "all.pt"))
    import_file(str(tmp_path / "all.pt"), Volume.of(tmp_path / "copy/step-00000006"))
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other_optimizer = torch.optim.AdamW(other.parameters())
    target = {"model": other, "optimizer": other_optimizer, "epoch": 0, "names": []}
    assert CheckpointManager(tmp_path / "copy").restore(target) == 6
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert (target["epoch"], target["names"]) == (7, ["a", "b"])


def test_one_value_can_be_taken_by_its_full_name(saved, tmp_path, assert_same):
    checkpoint, state = saved
    export_file(checkpoint, str(tmp_path / "deep.pt"), below="nested.list.1.deep")
    assert_same(torch.load(tmp_path / "deep.pt"), state["nested"]["list"][1]["deep"])
    export_file(checkpoint, str(tmp_path / "list.pt"), below="nested.list")
    assert_same(torch.load(tmp_path / "list.pt"), state["nested"]["list"])


@needs_safetensors
def test_safetensors_take_the_tensors_and_name_what_they_left_out(saved, tmp_path, capsys):
    from safetensors.torch import load_file

    checkpoint, state = saved
    out = str(tmp_path / "tensors.safetensors")
    assert main(["ckpt", "convert", str(checkpoint), out]) == 0
    assert "nested.number" in capsys.readouterr().out
    found = load_file(out)
    assert torch.equal(found["matrix"], state["matrix"])
    assert torch.equal(found["nested.list.1.deep"], state["nested"]["list"][1]["deep"])
    assert main(["ckpt", "convert", out, str(tmp_path / "back")]) == 0
    target = {"matrix": torch.zeros(300, 200)}
    dcp.load(target, storage_reader=UCVolumeReader(tmp_path / "back"))
    assert torch.equal(target["matrix"], state["matrix"])


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is not None, reason="safetensors is installed")
def test_without_safetensors_the_error_names_the_package(saved, tmp_path, capsys):
    assert main(["ckpt", "convert", str(saved[0]), str(tmp_path / "x.safetensors")]) == 1
    assert "pip install safetensors" in capsys.readouterr().err


def test_a_damaged_checkpoint_becomes_no_file(saved, tmp_path, shards, flip):
    shard = shards(tmp_path / "saved")[0]
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        export_file(saved[0], str(tmp_path / "x.pt"))
    assert list(tmp_path.glob("x.pt*")) == []


def test_nothing_that_exists_is_overwritten(saved, tmp_path):
    (tmp_path / "x.pt").write_bytes(b"mine")
    with pytest.raises(CheckpointExistsError, match=r"x\.pt exists"):
        export_file(saved[0], str(tmp_path / "x.pt"))
    torch.save({"a": torch.ones(1)}, tmp_path / "y.pt")
    with pytest.raises(CheckpointExistsError, match="published here"):
        import_file(str(tmp_path / "y.pt"), saved[0])
    assert (tmp_path / "x.pt").read_bytes() == b"mine"


class Custom:
    pass


@pytest.mark.parametrize(
    ("content", "message"), [(Custom(), "plain values"), (torch.ones(2), "no dict"), (None, "no such file")]
)
def test_a_file_that_is_no_state_dict_is_refused(content, message, tmp_path):
    if content is not None:
        torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        import_file(str(tmp_path / "x.pt"), Volume.of(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_takes(saved, tmp_path, capsys):
    path = str(saved[0])
    assert main(["ckpt", "convert", path, str(tmp_path / "folder")]) == 1
    assert main(["ckpt", "convert", str(tmp_path / "a.pt"), path, "--below", "x"]) == 1
    assert main(["ckpt", "convert", path, str(tmp_path / "a.pt"), "--below", "nothing"]) == 1
    errors = capsys.readouterr().err
    assert "must be a file" in errors
    assert "no meaning for a file" in errors
    assert "nothing under 'nothing'" in errors
    with pytest.raises(CheckpointNotFoundError):
        export_file(Volume.of(tmp_path / "empty"), str(tmp_path / "a.pt"))
