import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from airdata.checkpoint import CheckpointManager, UCVolumeReader, UCVolumeWriter, layout
from airdata.checkpoint.integrity import FileRecord, ItemRecord
from airdata.checkpoint.layout import new_save_id, shard_name
from airdata.checkpoint.publish import StoredItem, publish
from airdata.errors import CheckpointError, OutcomeUnknownError
from airdata.transport import Retry, open_transport
from airdata.transport.local import LocalTransport
from airdata.volume import Volume

DEADLINE = 60

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path):
    """One stored item, and the metadata that plans it."""
    name = shard_name(0, 0, new_save_id())
    (tmp_path / name).write_bytes(b"0123456789")
    file = FileRecord(name, 10, 0, (ItemRecord(0, 10, -1, (0,)),))
    metadata = Metadata({"x": torch.distributed.checkpoint.metadata.BytesStorageMetadata()})
    return open_transport(Volume.of(tmp_path)), metadata, {MetadataIndex("x"): StoredItem(file, file.items[0])}


def test_what_is_complete_is_published(saved, tmp_path):
    transport, metadata, stored = saved
    record = publish(transport, new_save_id(), metadata, stored, ranks=1)
    assert (tmp_path / ".metadata").exists()
    assert record.total_bytes == 10


@pytest.mark.parametrize("difference", ["an item too few", "an item too many", "a short file", "a missing file"])
def test_what_is_not_complete_is_not_published_and_leaves_nothing(difference, saved, tmp_path):
    transport, metadata, stored = saved
    [name] = [path.name for path in tmp_path.iterdir()]
    if difference == "an item too few":
        metadata.state_dict_metadata["lost"] = metadata.state_dict_metadata["x"]
    elif difference == "an item too many":
        stored[MetadataIndex("made up")] = stored[MetadataIndex("x")]
    elif difference == "a short file":
        (tmp_path / name).write_bytes(b"01234")
    else:
        (tmp_path / name).unlink()
    (tmp_path / "mine.txt").write_text("precious")
    pattern = {"few": "lost", "many": "made up", "file": name}[difference.split()[-1]]
    with pytest.raises(CheckpointError, match=pattern):
        publish(transport, new_save_id(), metadata, stored, ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


class Odd(SavePlan):
    """Not one of DCP's metadata classes."""


class OddPlanner(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"odd": Odd([])}
        return plans, metadata


def test_metadata_that_could_not_be_read_back_is_not_published(tmp_path):
    with pytest.raises(CheckpointException, match="is not one of DCP's classes"):
        dcp.save({"x": torch.ones(1)}, storage_writer=UCVolumeWriter(tmp_path), planner=OddPlanner())
    assert list(tmp_path.iterdir()) == []


def as_mount(volume):
    """A directory whose verbs are given up soon, as those of a mount that does not answer."""
    transport = LocalTransport(volume, Retry(deadline=1))
    transport._on_network = True
    return transport


def as_save(metadata):
    """Give the metadata the id of a new save, as the writer does."""
    metadata.storage_meta = StorageMeta(save_id=new_save_id())
    return metadata.storage_meta.save_id


@pytest.fixture
def stall(monkeypatch):
    """Make a function of ``os`` wait while ``.metadata`` is published; returns what lets the mount answer."""
    awake, put = threading.Event(), LocalTransport.put
    publishing = threading.Event()

    def put_and_tell(transport, path, source):
        (publishing.set if path == layout.METADATA else publishing.clear)()
        put(transport, path, source)

    def install(name):
        real = getattr(os, name)

        def waits(*args, **kwargs):
            if publishing.is_set() and threading.current_thread().name == "airdata-mount":
                assert awake.wait(DEADLINE)
            return real(*args, **kwargs)

        monkeypatch.setattr(LocalTransport, "put", put_and_tell)
        monkeypatch.setattr(os, name, waits)

        def answer():
            awake.set()
            for thread in threading.enumerate():
                if thread.name == "airdata-mount":
                    thread.join(DEADLINE)
                    assert not thread.is_alive()

        return answer

    yield install
    awake.set()


@pytest.fixture
def replacing(saved, tmp_path):
    """A published checkpoint, and the stored item of the one that is to replace it."""
    transport, metadata, stored = saved
    publish(transport, as_save(metadata), metadata, stored, ranks=1)
    name = shard_name(0, 0, new_save_id())
    (tmp_path / name).write_bytes(b"abcdefghij")
    file = FileRecord(name, 10, 0, (ItemRecord(0, 10, -1, (0,)),))
    return as_mount(transport.volume), metadata, {MetadataIndex("x"): StoredItem(file, file.items[0])}


def test_a_publish_that_was_given_up_does_not_happen_later(replacing, stall, tmp_path):
    transport, metadata, stored = replacing
    before = {path.name for path in tmp_path.iterdir()} - {stored[MetadataIndex("x")].file.name}
    answer = stall("fsync")
    with pytest.raises(CheckpointError, match=r"was not published.*nothing has moved"):
        publish(transport, as_save(metadata), metadata, stored, ranks=1)
    answer()
    assert {path.name for path in tmp_path.iterdir()} == before
    published = layout.read_published(transport)
    layout.check_sizes(transport, published.files())


def test_where_it_is_not_known_whether_a_publish_happens_every_file_stays(replacing, stall, tmp_path):
    transport, metadata, stored = replacing
    before = {path.name for path in tmp_path.iterdir()}
    answer = stall("replace")
    save_id = as_save(metadata)
    with pytest.raises(
        OutcomeUnknownError, match=r"whether the checkpoint was published is not known.*No file was rem"
    ):
        publish(transport, save_id, metadata, stored, ranks=1)
    assert before <= {path.name for path in tmp_path.iterdir()}
    layout.check_sizes(transport, layout.read_published(transport).files())  # the old one, until the mount answers
    answer()
    published = layout.read_published(transport)
    assert published.record.save_id == save_id
    layout.check_sizes(transport, published.files())


def test_a_managed_save_of_unknown_outcome_leaves_the_files_it_may_publish(stall, monkeypatch, tmp_path):
    monkeypatch.setattr("airdata.checkpoint.writer.open_transport", as_mount)
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(1, {"x": torch.zeros(4)})
        answer = stall("replace")
        with pytest.raises(CheckpointError, match="whether the checkpoint was published is not known"):
            manager.save(1, {"x": torch.ones(4)})
    answer()
    state = {"x": torch.zeros(4)}
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(state) == 1
    assert torch.equal(state["x"], torch.ones(4))


def test_a_writer_that_may_have_published_discards_nothing_though_its_error_reaches_no_rank(
    stall, monkeypatch, tmp_path
):
    monkeypatch.setattr("airdata.checkpoint.writer.open_transport", as_mount)
    writer = UCVolumeWriter(tmp_path)
    answer = stall("replace")
    with pytest.raises(CheckpointException, match="whether the checkpoint was published is not known"):
        dcp.save({"x": torch.ones(4)}, storage_writer=writer)
    writer.discard()
    answer()
    state = {"x": torch.zeros(4)}
    dcp.load(state, storage_reader=UCVolumeReader(tmp_path))
    assert torch.equal(state["x"], torch.ones(4))
