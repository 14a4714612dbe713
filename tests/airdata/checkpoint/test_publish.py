import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from airdata.checkpoint import UCVolumeWriter
from airdata.checkpoint.integrity import FileRecord, ItemRecord
from airdata.checkpoint.layout import new_save_id, shard_name
from airdata.checkpoint.publish import StoredItem, publish
from airdata.errors import CheckpointError
from airdata.transport import open_transport
from airdata.volume import Volume

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
