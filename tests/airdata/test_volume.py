"""Where a path lives: every form a user writes, and every form that must never be taken for a local directory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.errors import VolumeError
from airdata.volume import Volume, filesystem_type, is_network_filesystem, mounted_type, safe_url

VOLUME_PATHS = ["/Volumes/main/demo/digits", "dbfs:/Volumes/main/demo/digits", "/Volumes/main/demo/digits/"]


@pytest.mark.parametrize("path", VOLUME_PATHS)
def test_a_volume_path_is_mapped_to_a_directory(path, tmp_path, monkeypatch):
    monkeypatch.setenv("AIRDATA_VOLUMES", str(tmp_path))
    assert Volume.of(path).directory == f"{tmp_path}/main/demo/digits"


@pytest.mark.parametrize("path", VOLUME_PATHS)
def test_a_volume_path_is_mapped_to_a_url(path, monkeypatch):
    monkeypatch.setenv("AIRDATA_VOLUMES", "s3://bucket/volumes/")
    volume = Volume.of(path)
    assert volume.url == "s3://bucket/volumes/main/demo/digits"
    assert volume.directory is None


@pytest.mark.parametrize("path", VOLUME_PATHS)
def test_a_volume_that_is_nowhere_says_what_to_set(path):
    with pytest.raises(VolumeError, match="AIRDATA_VOLUMES"):
        Volume.of(path)


@pytest.mark.parametrize("path", ["/Volumes", "/Volumes/main", "/Volumes/main/demo", "/Volumes/a/b/c/../../../etc"])
def test_a_volume_path_has_three_names_and_no_dots(path, tmp_path, monkeypatch):
    monkeypatch.setenv("AIRDATA_VOLUMES", str(tmp_path))
    with pytest.raises(VolumeError, match="/Volumes"):
        Volume.of(path)


def test_a_mapping_into_volumes_itself_is_refused(monkeypatch):
    monkeypatch.setenv("AIRDATA_VOLUMES", "/Volumes/main/demo/other")
    with pytest.raises(VolumeError, match="outside /Volumes"):
        Volume.of("/Volumes/main/demo/digits")


@pytest.mark.parametrize("path", ["s3:/bucket/key", "dbfs:/tmp/x", Path("s3://bucket/key"), Path("gs://b/k")])
def test_a_mangled_url_is_never_a_local_directory(path):
    with pytest.raises(VolumeError, match="neither a URL nor a directory"):
        Volume.of(path)


@pytest.mark.parametrize("path", ["", None, 3, b"bytes"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises((VolumeError, TypeError)):
        Volume.of(path)


def test_directories_are_absolute_and_file_urls_are_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Volume.of("data").directory == str(tmp_path / "data")
    assert Volume.of(tmp_path).directory == str(tmp_path)
    assert Volume.of(f"file://{tmp_path}/a%20b").directory == f"{tmp_path}/a b"
    assert Volume.of("~/x").directory == os.path.expanduser("~/x")


def test_credentials_show_nowhere():
    volume = Volume.of("https://user:secret@host/data?sig=secret", {"password": "secret"})
    assert "secret" not in f"{volume} {volume!r}" or "secret" not in str(volume)
    assert "secret" not in str(volume)
    assert "secret" not in repr(Volume.of("s3://bucket/data", {"secret": "secret"}))


@given(st.text(alphabet="abc?#%&=", min_size=1, max_size=8))
def test_safe_url_leaves_plain_object_names_alone(key):
    assert safe_url(f"s3://bucket/{key}") == f"s3://bucket/{key}"
    assert (
        safe_url("abfss://container@account.dfs.core.windows.net/x")
        == "abfss://container@account.dfs.core.windows.net/x"
    )


def test_a_child_keeps_options_and_name(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRDATA_VOLUMES", str(tmp_path))
    child = Volume.of("/Volumes/main/demo/digits", {"a": 1}).child("train")
    assert child.url == f"{tmp_path}/main/demo/digits/train"
    assert (str(child), child.storage_options) == ("/Volumes/main/demo/digits/train", {"a": 1})
    assert pickle.loads(pickle.dumps(child)) == child


def test_mounts_of_a_network_are_told_from_local_disks(tmp_path):
    assert Volume.of(tmp_path).in_place
    assert not Volume.of("s3://bucket/x").in_place
    assert filesystem_type("/proc/self") == "proc"
    (tmp_path / "link").symlink_to("/proc")
    assert filesystem_type(str(tmp_path / "link" / "self")) == "proc"
    for kind in ("fuse.rclone", "fuse", "nfs4", "cifs", "lustre"):
        assert is_network_filesystem(kind)
    for kind in ("ext4", "xfs", "overlay", "tmpfs", "fuseblk", ""):
        assert not is_network_filesystem(kind)


MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - overlay overlay rw
30 22 0:25 / /mnt/data rw - nfs4 server:/export rw,vers=4.2
31 22 0:26 / /mnt/data/local rw - ext4 /dev/sda1 rw
32 22 0:27 / /mnt/with\\040blank rw - fuse.rclone bucket: rw
33 22 0:28 / /mnt/ü rw - cifs //server/share rw
34 22 0:29 / /mnt/twice rw - ext4 /dev/sdb1 rw
35 34 0:30 / /mnt/twice rw shared:7 master:3 - lustre fs rw
""".encode()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "overlay"),
        ("/mnt/data", "nfs4"),
        ("/mnt/data/train/a", "nfs4"),
        ("/mnt/database", "overlay"),
        ("/mnt/data/local/a", "ext4"),
        ("/mnt/with blank/a", "fuse.rclone"),
        ("/mnt/ü/a", "cifs"),
        ("/mnt/twice/a", "lustre"),  # the later mount covers the earlier
    ],
)
def test_the_mount_that_holds_a_path_is_found(path, kind):
    assert mounted_type(MOUNTS, path) == kind


def test_a_volume_keeps_its_hedging_with_its_children_and_new_options():
    volume = Volume.of("s3://b/x", hedge_seconds=0.5)
    assert volume.child("y").hedge_seconds == 0.5
    assert Volume.of(volume, {"anon": True}).hedge_seconds == 0.5
    assert Volume.of(volume, {"anon": True}).storage_options == {"anon": True}
    assert Volume.of("s3://b/x").hedge_seconds == 0
