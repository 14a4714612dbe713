import numpy as np
import pytest

from airdata.checkpoint.source import DirectorySource, TransportSource, open_source
from airdata.errors import CorruptCheckpointError
from airdata.transport import open_transport
from airdata.volume import Volume

CONTENT = bytes(range(256)) * 80_000  # 20 MB: more than one part


@pytest.fixture(params=["directory", "memory"])
def source(request, tmp_path):
    volume = Volume.of(tmp_path if request.param == "directory" else f"memory://source/{tmp_path.name}")
    open_transport(volume).put("data", CONTENT)
    return open_source(open_transport(volume))


def test_each_kind_of_volume_has_its_source(tmp_path):
    assert isinstance(open_source(open_transport(Volume.of(tmp_path))), DirectorySource)
    assert isinstance(open_source(open_transport(Volume.of("memory://x"))), TransportSource)


@pytest.mark.parametrize("sizes", [[10], [0, 5, 0, 7], [3, 20_000_000, 11], []])
def test_views_are_filled_one_after_another(source, sizes):
    views = [np.zeros(size, np.uint8) for size in sizes]
    source.read_into("data", 100, views)
    assert b"".join(view.tobytes() for view in views) == CONTENT[100 : 100 + sum(sizes)]


def test_a_file_that_ends_too_early_is_named_with_its_end(source):
    with pytest.raises(CorruptCheckpointError, match=f"data ends at byte {len(CONTENT)}"):
        source.read_into("data", len(CONTENT) - 5, [np.zeros(6, np.uint8)])


def test_a_missing_file_is_named(source):
    with pytest.raises(CorruptCheckpointError, match="gone is missing"):
        source.read_into("gone", 0, [np.zeros(1, np.uint8)])
