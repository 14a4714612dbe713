import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from airdata.checkpoint import UCVolumeWriter
from airdata.checkpoint.verify import verify_checkpoint
from airdata.errors import CheckpointNotFoundError, CorruptCheckpointError
from airdata.transport import open_transport
from airdata.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_an_intact_checkpoint_is_read_in_full(tmp_path):
    dcp.save({"x": torch.ones(5_000_000), "n": 1}, storage_writer=UCVolumeWriter(tmp_path))
    read = []
    published = verify_checkpoint(open_transport(Volume.of(tmp_path)), progress=read.append)
    assert sum(read) == published.record.total_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.distcp"))


def test_a_bit_anywhere_is_noticed_and_its_file_named(tmp_path, shards, flip):
    state = {f"t{n}": torch.ones(200) for n in range(6)}
    dcp.save(state, storage_writer=UCVolumeWriter(tmp_path, file_bytes=5000))
    transport = open_transport(Volume.of(tmp_path))
    for shard in shards(tmp_path):
        for position in (0, shard.stat().st_size // 3, shard.stat().st_size - 1):
            flip(shard, position)
            with pytest.raises(CorruptCheckpointError, match=shard.name):
                verify_checkpoint(transport)
            flip(shard, position)
    verify_checkpoint(transport)


def test_of_a_stock_checkpoint_only_missing_files_can_be_told(tmp_path, shards):
    dcp.save({"x": torch.ones(10)}, storage_writer=FileSystemWriter(tmp_path))
    assert verify_checkpoint(open_transport(Volume.of(tmp_path))).record is None
    shards(tmp_path)[0].unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        verify_checkpoint(open_transport(Volume.of(tmp_path)))


def test_nothing_published_is_not_corrupt(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(open_transport(Volume.of(tmp_path)))
