import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from airdata.checkpoint import UCVolumeWriter, retention
from airdata.checkpoint.layout import step_name
from airdata.checkpoint.policies import KeepBest, KeepEvery, KeepLast
from airdata.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    assert retention.prune(root, 4, [KeepLast(1), KeepEvery(2)], dry_run=True) == [1, 3]
    assert retention.prune(root, 4, [KeepLast(1), KeepEvery(2)]) == [1, 3]
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
        assert retention.prune(root, 3, [KeepLast(2)]) == []
    assert "is missing" in caplog.text
    assert retention.published_steps(root) == [1, 2, 3]


def test_leftovers_of_killed_saves_go_when_they_are_old(tmp_path):
    root = Volume.of(tmp_path)
    for step, began in ((1, "20200101T000000Z"), (2, "20990101T000000Z"), (7, "20200101T000000Z")):
        folder = tmp_path / step_name(step)
        folder.mkdir()
        (folder / f"__0_0.{began}-00000000.distcp").write_bytes(b"half")
    save(root, 5)
    retention.prune(root, 5, [KeepLast(1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(2), step_name(5), step_name(7)]


def test_an_empty_folder_goes_unless_a_save_may_have_made_it_just_now(tmp_path):
    for step in (1, 2):
        (tmp_path / step_name(step)).mkdir()
    os.utime(tmp_path / step_name(1), (1e9, 1e9))
    root = Volume.of(tmp_path)
    save(root, 3)
    retention.prune(root, 3, [KeepLast(1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(2), step_name(3)]


PUTS_FOR_EVER = """
import sys
from airdata.transport import open_transport
from airdata.volume import Volume
transport = open_transport(Volume.of(sys.argv[1]))
while True:
    transport.put(".metadata", bytes(1 << 20))
"""


def test_what_a_kill_leaves_of_a_put_goes_when_it_is_old(tmp_path):
    redone, torn = tmp_path / step_name(4), tmp_path / step_name(3)
    putting = subprocess.Popen([sys.executable, "-c", PUTS_FOR_EVER, str(torn)])
    deadline = time.monotonic() + 60
    try:
        while not (parts := list(torn.glob("*.part"))):  # the kill may fall between two puts
            assert time.monotonic() < deadline
            putting.send_signal(signal.SIGCONT)
            time.sleep(0.001)
            putting.send_signal(signal.SIGSTOP)
            os.waitpid(putting.pid, os.WUNTRACED)  # it has stopped, or ended
    finally:
        putting.kill()
        putting.wait()
    [part] = parts
    (torn / ".metadata").unlink(missing_ok=True)
    redone.mkdir()
    (redone / part.name).write_bytes(b"half")
    root = Volume.of(tmp_path)
    save(root, 4)
    retention.prune(root, 4, [KeepLast(1)])
    assert part.exists()
    assert (redone / part.name).exists()
    for path in (part, redone / part.name):
        os.utime(path, (1e9, 1e9))
    save(root, 4)
    retention.prune(root, 4, [KeepLast(1)])
    assert not torn.exists()
    assert list(redone.glob("*.part")) == []
    assert retention.published_steps(root) == [4]


def test_stock_checkpoints_are_pruned_by_what_their_metadata_names(tmp_path):
    root = Volume.of(tmp_path)
    save(root, 1, lambda volume: FileSystemWriter(volume.directory))
    save(root, 2)
    assert retention.prune(root, 2, [KeepLast(1)]) == [1]
    assert not (tmp_path / step_name(1)).exists()


def test_the_best_is_found_by_what_was_saved_with_it(root):
    for step, loss in {1: 0.5, 2: 0.1, 3: 0.7, 4: 0.9}.items():
        save(root, step, lambda volume, loss=loss: UCVolumeWriter(volume, metrics={"loss": loss}))
    assert retention.prune(root, 4, [KeepLast(1), KeepBest("loss")]) == [1, 3]
    assert retention.published_steps(root) == [2, 4]
    assert retention.prune(root, 4, []) == []
