import errno
import os
import pickle
import threading

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter
from airdata.checkpoint.placement import Budget, InPlace, Upload, check_room
from airdata.errors import StagingFullError
from airdata.transport import open_transport
from airdata.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LARGE = 40 << 20


def test_a_budget_is_never_exceeded_and_a_larger_request_goes_alone():
    budget, used, peak, lock = Budget(10), 0, 0, threading.Lock()

    def take(size):
        nonlocal used, peak
        for _ in range(50):
            with budget.of(size):
                with lock:
                    used += min(size, 10)
                    peak = max(peak, used)
                with lock:
                    used -= min(size, 10)

    threads = [threading.Thread(target=take, args=(size,)) for size in (3, 4, 7, 10, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert peak <= 10


def test_a_name_is_written_once(tmp_path):
    (tmp_path / "name").write_bytes(b"published")
    with pytest.raises(FileExistsError):
        InPlace(str(tmp_path)).write("name", 10, lambda shard: shard.add(torch.ones(3)))
    assert (tmp_path / "name").read_bytes() == b"published"


def test_what_is_too_large_for_the_disk_is_refused_before_the_first_byte(tmp_path):
    with pytest.raises(StagingFullError, match="make room") as caught:
        check_room(str(tmp_path), 1 << 60)
    assert isinstance(caught.value, OSError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_a_small_file_goes_up_from_memory_and_a_large_one_through_the_staging_directory(tmp_path):
    staged = []

    class Watching(MemoryFileSystem):
        protocol = "watching"

        def put_file(self, local, remote, **kwargs):
            staged.append((os.path.dirname(local), os.path.getsize(local)))
            super().put_file(local, remote, **kwargs)

    fsspec.register_implementation("watching", Watching, clobber=True)
    state = {"small": torch.ones(10), "large": torch.ones(LARGE // 4)}
    dcp.save(state, storage_writer=UCVolumeWriter("watching://a", staging_dir=tmp_path, threads=8))
    [(folder, size)] = staged
    assert (folder, list(tmp_path.iterdir())) == (str(tmp_path), [])
    assert size > LARGE
    target = {"small": torch.zeros(10), "large": torch.zeros(LARGE // 4)}
    dcp.load(target, storage_reader=UCVolumeReader("watching://a"))
    assert torch.equal(target["large"], state["large"])


@pytest.mark.parametrize(("memory_bytes", "staged"), [(1, True), (4 * LARGE, False), (8 * LARGE, False)])
def test_how_much_may_be_held_in_memory_can_be_said(memory_bytes, staged, tmp_path):
    class Noting(MemoryFileSystem):
        protocol = "noting"
        put = False

        def put_file(self, local, remote, **kwargs):
            Noting.put = True
            super().put_file(local, remote, **kwargs)

    fsspec.register_implementation("noting", Noting, clobber=True)
    state = {"x": torch.ones(LARGE // 4 - 1000)}
    writer = UCVolumeWriter("noting://a", staging_dir=tmp_path, memory_bytes=memory_bytes, threads=4)
    dcp.save(state, storage_writer=writer)
    assert Noting.put == staged


def test_an_upload_that_fails_leaves_nothing_staged_and_nothing_published(tmp_path):
    class Refusing(MemoryFileSystem):
        protocol = "refusing"

        def put_file(self, local, remote, **kwargs):
            raise PermissionError("the token has expired")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    writer = UCVolumeWriter("refusing://a", staging_dir=tmp_path, memory_bytes=1)
    with pytest.raises(CheckpointException, match="the token has expired"):
        dcp.save({"x": torch.ones(LARGE // 4)}, storage_writer=writer)
    assert list(tmp_path.iterdir()) == []
    assert list(open_transport(Volume.of("refusing://a")).list()) == []


def test_a_full_staging_disk_is_tried_again_alone_and_then_a_typed_error(tmp_path):
    attempts = []

    def fill(shard):
        attempts.append(1)
        shard.add(torch.ones(3))
        if len(attempts) <= failures:
            raise OSError(errno.ENOSPC, "No space left on device")

    upload = Upload(open_transport(Volume.of("memory://placement/full")), str(tmp_path), Budget(1000), 0)
    failures = 1
    assert upload.write("a", 100, fill).size > 0
    failures = 9
    with pytest.raises(StagingFullError, match="no room for"):
        upload.write("b", 100, fill)
    assert list(tmp_path.iterdir()) == []
    assert len(attempts) == 4


def test_a_full_target_disk_fails_the_save_with_a_typed_error(tmp_path):
    full = os.path.join("/dev/full")
    if not os.path.exists(full):
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="No space left"), open(full, "wb", buffering=0) as sink:
        sink.write(b"x")  # what the kernel says when a disk is full

    class Full(torch.distributed.checkpoint.DefaultSavePlanner):
        def resolve_data(self, item):
            with open(full, "wb", buffering=0) as sink:
                sink.write(b"x")

    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.ones(3)}, storage_writer=UCVolumeWriter(tmp_path / "c"), planner=Full())
    assert isinstance(caught.value.failures[0][0], StagingFullError)
    assert list((tmp_path / "c").iterdir()) == []
