import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter

from airdata.checkpoint import UCVolumeWriter, retention
from airdata.checkpoint.layout import step_name
from airdata.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

steps_lists = st.lists(st.integers(0, 60), unique=True, max_size=20)


@given(
    steps_lists,
    st.integers(0, 60),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 10)),
    st.sets(st.integers(0, 60)),
)
def test_what_stays(steps, current, keep_last, keep_every, broken):
    gone = retention.expired(
        steps, current, keep_last=keep_last, keep_every=keep_every, valid=lambda step: step not in broken
    )
    stays = set(steps) - set(gone)
    assert gone == sorted(gone)
    assert all(step < current for step in gone)
    assert {step for step in steps if step >= current} <= stays
    valid = sorted(s for s in steps if s <= current and (s not in broken or s == current))
    assert set(valid[-keep_last:]) <= stays
    if keep_every:
        assert not any(step % keep_every == 0 for step in gone)
    # and nothing else: what is older than the last that count, and no multiple, is gone
    if len(valid) >= keep_last:
        oldest = valid[-keep_last]
        assert {s for s in stays if s < oldest} == {
            s for s in steps if s < oldest and keep_every and s % keep_every == 0
        }
    else:
        assert gone == []


def test_none_keeps_everything():
    assert retention.expired([1, 2, 3], 3, keep_last=None, keep_every=None) == []


@pytest.fixture(params=["directory", "memory"])
def root(request, tmp_path):
    return Volume.of(tmp_path / "root" if request.param == "directory" else f"memory://retention/{tmp_path.name}")


def save(root, step, writer=UCVolumeWriter):
    dcp.save({"x": torch.full((10,), float(step))}, storage_writer=writer(root.child(step_name(step))))


def files(root):
    from airdata.transport import open_transport

    return {file.path for file in open_transport(root).list()}


def test_steps_are_those_that_are_published(root):
    for step in (3, 1, 20):
        save(root, step)
    from airdata.transport import open_transport

    transport = open_transport(root)
    transport.put("step-00000099/__0_0.20260101T000000Z-00000000.distcp", b"not published")
    transport.put("step-00000100.bak/.metadata", b"no step")
    assert retention.published_steps(root) == [1, 3, 20]
    assert retention.published_steps(root.child("nowhere")) == []


def test_pruning_removes_old_steps_whole_and_nothing_else(root):
    from airdata.transport import open_transport

    for step in (1, 2, 3, 4, 9):
        save(root, step)
    transport = open_transport(root)
    transport.put("step-00000001/mine.txt", b"precious")
    transport.put("readme.txt", b"precious")
    transport.put("step-00000003/__0_0.20200101T000000Z-00000000.distcp", b"of a save killed long ago, then redone")
    kept = {name for name in files(root) if name.startswith(("step-00000004", "step-00000009"))}
    assert retention.prune(root, 4, keep_last=1, keep_every=2, dry_run=True) == [1, 3]
    assert retention.prune(root, 4, keep_last=1, keep_every=2) == [1, 3]
    assert retention.published_steps(root) == [2, 4, 9]
    left = files(root)
    assert kept < left
    assert {name for name in left if not name.startswith(("step-00000002", "step-00000004", "step-00000009"))} == {
        "step-00000001/mine.txt",
        "readme.txt",
    }


def test_a_damaged_checkpoint_does_not_count(tmp_path, caplog):
    root = Volume.of(tmp_path)
    for step in (1, 2, 3):
        save(root, step)
    next((tmp_path / "step-00000002").glob("*.distcp")).unlink()
    with caplog.at_level(logging.WARNING):
        assert retention.prune(root, 3, keep_last=2, keep_every=None) == []
    assert "is missing" in caplog.text
    assert retention.published_steps(root) == [1, 2, 3]


def test_leftovers_of_killed_saves_go_when_they_are_old(tmp_path):
    root = Volume.of(tmp_path)
    for step, time in ((1, "20200101T000000Z"), (2, "20990101T000000Z"), (7, "20200101T000000Z")):
        folder = tmp_path / step_name(step)
        folder.mkdir()
        (folder / f"__0_0.{time}-00000000.distcp").write_bytes(b"half")
    save(root, 5)
    retention.prune(root, 5, keep_last=1, keep_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(2), step_name(5), step_name(7)]


def test_stock_checkpoints_are_pruned_by_what_their_metadata_names(tmp_path):
    root = Volume.of(tmp_path)
    save(root, 1, lambda volume: FileSystemWriter(volume.directory))
    save(root, 2)
    assert retention.prune(root, 2, keep_last=1, keep_every=None) == [1]
    assert not (tmp_path / step_name(1)).exists()
