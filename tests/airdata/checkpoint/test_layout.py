import os
import pickle
from datetime import datetime, timedelta, timezone

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from airdata.checkpoint import UCVolumeWriter, layout
from airdata.errors import CheckpointNotFoundError, CorruptCheckpointError
from airdata.transport import FileInfo, open_transport
from airdata.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@given(st.integers(0, 10**12))
def test_a_step_is_read_back_from_its_name(step):
    assert layout.step_of(layout.step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-100",
        "step-00000100.bak",
        "xstep-00000100",
        "step-000000100",
        "step-\u0660\u0660\u0660\u0660\u0660\u0661\u0660\u0660",
        "step-",
        "step-0000010x",
    ],
)
def test_a_name_that_is_almost_a_step_is_none(name):
    assert layout.step_of(name) is None


def test_steps_are_not_negative():
    with pytest.raises(ValueError, match="-1"):
        layout.step_name(-1)


def test_a_save_id_tells_its_time_and_is_in_every_name():
    before = datetime.now(timezone.utc) - timedelta(seconds=2)
    save_id = layout.new_save_id()
    assert before < layout.save_time(save_id) <= datetime.now(timezone.utc)
    assert layout.shard_save_id(layout.shard_name(3, 1, save_id)) == save_id
    assert layout.shard_save_id(layout.integrity_name(save_id)) == save_id
    assert layout.new_save_id() != save_id


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "model.pt", "sub/__0_0.20260101T000000Z-00000000.distcp"]
)
def test_other_files_belong_to_no_save_of_ours_and_are_never_abandoned(name):
    assert layout.shard_save_id(name) is None
    assert not layout.is_leftover(name)
    assert not layout.is_abandoned(FileInfo(name, 1, "mtime:1"), timedelta(0))


def test_only_an_old_save_is_abandoned():
    old = layout.shard_name(0, 0, "20200101T000000Z-00000000")
    assert layout.is_abandoned(FileInfo(old, 1), timedelta(days=1))
    new = layout.shard_name(0, 0, layout.new_save_id())
    assert not layout.is_abandoned(FileInfo(new, 1, "mtime:1"), timedelta(days=1))
    assert layout.is_leftover(old)
    assert layout.is_leftover(new)


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps(Metadata({}, planner_data=Evil(), storage_data={})),
        pickle.dumps(torch.nn.Linear(1, 1)),
        b"cos\nsystem\n(S'true'\ntR.",
        b"ctorch\nhub.load\n.",
        b"",
        b"garbage",
    ],
)
def test_metadata_admits_nothing_but_the_classes_of_dcp(data):
    with pytest.raises(CorruptCheckpointError, match=r"here/\.metadata"):
        layout.load_metadata(data, "here/.metadata")


@pytest.mark.parametrize("data", [pickle.dumps({}), pickle.dumps(Metadata({}))])
def test_metadata_that_describes_no_checkpoint_is_refused(data):
    with pytest.raises(CorruptCheckpointError, match="not DCP metadata"):
        layout.load_metadata(data, "m")


@pytest.fixture(params=["ours", "stock"])
def saved(request, tmp_path, make_state):
    writer = UCVolumeWriter(tmp_path) if request.param == "ours" else FileSystemWriter(tmp_path)
    dcp.save(make_state(1), storage_writer=writer)
    return tmp_path


def test_metadata_of_any_writer_is_read_in_full(saved):
    published = layout.read_published(open_transport(Volume.of(saved)))
    assert published.metadata == pickle.loads((saved / ".metadata").read_bytes())
    assert published.files().keys() == {path.name for path in saved.glob("*.distcp")}


def test_nothing_published_is_an_error_of_its_own(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        layout.read_published(open_transport(Volume.of(tmp_path / "nowhere")))


def test_a_flipped_bit_in_metadata_or_record_is_noticed(tmp_path, make_state, flip):
    dcp.save(make_state(1), storage_writer=UCVolumeWriter(tmp_path))
    transport = open_transport(Volume.of(tmp_path))
    [record] = tmp_path.glob(".integrity.*.json")
    for path in (tmp_path / ".metadata", record):
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 40)):
            flip(path, position)
            with pytest.raises(CorruptCheckpointError):
                layout.read_published(transport)
            path.write_bytes(content)
    assert layout.read_published(transport).record is not None


def test_a_lost_record_is_not_taken_for_a_stock_checkpoint(tmp_path, make_state):
    dcp.save(make_state(1), storage_writer=UCVolumeWriter(tmp_path))
    [record] = tmp_path.glob(".integrity.*.json")
    record.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"integrity record .* is missing"):
        layout.read_published(open_transport(Volume.of(tmp_path)))


def test_what_metadata_claims_outside_its_folder_is_never_owned(tmp_path, make_state):
    dcp.save(make_state(1), storage_writer=FileSystemWriter(tmp_path))
    published = layout.read_published(open_transport(Volume.of(tmp_path)))
    for info in published.metadata.storage_data.values():
        info.relative_path = "../precious"
    assert list(published.owned()) == []
