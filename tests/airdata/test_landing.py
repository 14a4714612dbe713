"""Where entries come to lie: in the folders of the volume, and elsewhere when that place is taken."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from airdata.cache import CachedFile, VolumeCache
from airdata.cache.names import entry_name, generation_name
from airdata.cache.root import Layout
from airdata.transport import FileInfo
from airdata.transport.local import LocalTransport
from airdata.volume import Volume


class Versions(LocalTransport):
    """A source of which every version can be read: the last letter of the version, over and over."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(Volume.of(str(directory)))
        self.fetched: list[FileInfo] = []

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        self.fetched.append(FileInfo(path, size, version))
        return Path(destination).write_bytes(content_of(self.fetched[-1]))


def content_of(file: FileInfo) -> bytes:
    return f"{file.version[-1]}".encode() * file.size


def content(lease: CachedFile) -> bytes:
    return Path(lease.local_path).read_bytes()


@pytest.fixture
def transport(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "volume")


@pytest.fixture
def cache(tmp_path: Path) -> VolumeCache:
    return VolumeCache(tmp_path / "cache", min_free_bytes=0)


def test_files_of_one_folder_share_one_and_cost_one_inode_each(cache, transport, tmp_path) -> None:
    for number in range(50):
        cache.open(transport, FileInfo(f"train/cat/{number}.jpg", 10, "etag:a")).release()
    folders = [folder for folder, _, _ in os.walk(tmp_path / "cache" / "files")]
    assert len(folders) == 5  # files, source, first, train, cat


def test_versions_of_a_file_lie_side_by_side_and_each_is_found(cache, transport) -> None:
    versions = [FileInfo("a/x.jpg", 10, f"etag:{letter}") for letter in "abc"]
    leases = [cache.open(transport, file) for file in versions]
    for file, lease in zip(versions, leases, strict=True):
        assert content(lease) == content_of(file)
        assert lease.local_path.endswith("/a/x.jpg")
        found = cache.find(transport, file)
        assert found is not None
        assert found.local_path == lease.local_path
    assert len(transport.fetched) == 3


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b")])
def test_an_object_that_is_another_ones_folder_is_kept_too(cache, transport, paths) -> None:
    files = [FileInfo(path, 10, f"etag:{number}") for number, path in enumerate(paths)]
    for _epoch in range(2):
        for file in files:
            with cache.open(transport, file) as lease:
                assert content(lease) == content_of(file)
    assert len(transport.fetched) == 2


def test_an_entry_that_somebody_has_written_to_is_not_served(cache, transport) -> None:
    file = FileInfo("a/x.jpg", 10, "etag:a")
    with cache.open(transport, file) as lease:
        Path(lease.local_path).write_bytes(b"0123456789")  # as long as before
    for _ in range(2):
        with cache.open(transport, file) as lease:
            assert content(lease) == content_of(file)
    assert len(transport.fetched) == 2


def test_an_entry_that_a_power_cut_has_shortened_is_replaced(cache, transport) -> None:
    file = FileInfo("a/x.jpg", 10, "etag:a")
    with cache.open(transport, file) as lease:
        stamp = os.stat(lease.local_path).st_mtime_ns
        Path(lease.local_path).write_bytes(b"")
        os.utime(lease.local_path, ns=(stamp, stamp))
    with cache.open(transport, file) as again:
        assert again.local_path == lease.local_path
        assert content(again) == content_of(file)
    assert cache.info().files == 1


def test_two_versions_that_arrive_at_once_replace_nothing(transport, tmp_path) -> None:
    caches = [VolumeCache(tmp_path / "cache", min_free_bytes=0) for _ in "ab"]
    start = threading.Barrier(2)
    leases: dict[FileInfo, CachedFile] = {}

    def read(cache: VolumeCache, version: str) -> None:
        for number in range(100):
            file = FileInfo(f"a/{number}.jpg", 10, version)
            start.wait(60)
            leases[file] = cache.open(transport, file)

    threads = [
        threading.Thread(target=read, args=(cache, f"etag:{letter}"))
        for cache, letter in zip(caches, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 200
    for file, lease in leases.items():
        assert content(lease) == content_of(file)


def test_what_a_dead_process_had_named_twice_is_not_written_to(cache, transport) -> None:
    file = FileInfo("a/x.jpg", 10, "etag:a")
    with cache.open(transport, file) as lease, open(lease.local_path, "rb") as reader:
        name = entry_name(generation_name(transport.volume.url), file)
        os.link(lease.local_path, Layout(cache.root).part(name))  # killed between the link and the other name's end
        os.utime(lease.local_path)  # nobody's version any more, so that it is fetched again
        before = os.fstat(reader.fileno()).st_mtime_ns
        cache.open(transport, file).release()
        assert os.fstat(reader.fileno()).st_mtime_ns == before
        assert len(transport.fetched) == 2


def refused(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "not on this disk")


def in_whole_seconds(path: str, *, ns: tuple[int, int], utime: Callable[..., None] = os.utime) -> None:
    utime(path, ns=(ns[0] // 10**9 * 10**9, ns[1] // 10**9 * 10**9))


@pytest.mark.parametrize(("call", "instead"), [("link", refused), ("utime", refused), ("utime", in_whole_seconds)])
def test_a_disk_that_lacks_something_is_served_as_well(cache, transport, monkeypatch, call, instead) -> None:
    monkeypatch.setattr(os, call, instead)
    files = [FileInfo(f"a/{number}.jpg", 10, f"etag:{number % 10}") for number in range(20)]
    for _epoch in range(2):
        for file in files:
            with cache.open(transport, file) as lease:
                assert content(lease) == content_of(file)
    assert len(transport.fetched) == 20


# --- what is removed ---


def files_of(paths: list[str], letter: str = "a") -> list[FileInfo]:
    return [FileInfo(path, 10, f"etag:{letter}") for path in paths]


def fill(directory: Path, transport: Versions, files: list[FileInfo], *, room: int) -> int:
    """Read all in a new run, for which the cache has so much room; how many were fetched."""
    cache, before = VolumeCache(directory, max_bytes=room, min_free_bytes=0), len(transport.fetched)
    for file in files:
        with cache.open(transport, file) as lease:
            assert content(lease) == content_of(file)
    return len(transport.fetched) - before


def test_folders_that_are_named_as_ours_are_hold_files_like_any_other(transport, tmp_path) -> None:
    paths = [f"{digit * 32}/{name}" for digit in "abc" for name in ("metrics.json", "params.json")]
    files = files_of([*paths, "first/x", f"ab/{'a' * 32}/y"])
    assert fill(tmp_path / "cache", transport, files, room=80) == 8
    assert fill(tmp_path / "cache", transport, files, room=80) == 0


def test_entries_that_lost_their_stamps_make_room(transport, tmp_path) -> None:
    files = files_of([f"a/{number}" for number in range(8)])
    assert fill(tmp_path / "first", transport, files, room=80) == 8
    shutil.copytree(tmp_path / "first", tmp_path / "copied", copy_function=shutil.copyfile)
    assert fill(tmp_path / "copied", transport, files, room=80) == 8
    assert fill(tmp_path / "copied", transport, files, room=80) == 0


def test_folders_of_files_that_left_leave_too(transport, tmp_path) -> None:
    days = [files_of([f"day{day}/x"], "a") for day in range(5)]
    for files in days:
        fill(tmp_path / "cache", transport, files, room=50)
    long_ago = time.time_ns() - 30 * 24 * 3600 * 10**9
    for path in (tmp_path / "cache" / "files").rglob("x"):
        os.utime(path, ns=(long_ago, path.stat().st_mtime_ns))
    fill(tmp_path / "cache", transport, files_of(["today/x"]), room=50)
    assert [path.name for path in (tmp_path / "cache" / "files").glob("*/first/*")] == ["today"]


@pytest.mark.parametrize("place", ["files/{source}/first", "files/{source}", "transient/{digest}", "trash/{digest}.x"])
def test_links_in_place_of_our_folders_lead_no_removal_outside(transport, tmp_path, place) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_bytes(b"x" * 10)
    os.utime(mine / "precious", (0, 0))
    directory = tmp_path / "cache"
    fill(directory, transport, files_of(["a"]), room=10)
    link = directory / place.format(source=generation_name(transport.volume.url), digest="a" * 32)
    if link.exists():
        shutil.rmtree(link)
    link.symlink_to(mine)
    fill(directory, transport, files_of(["b"]), room=10)
    VolumeCache(directory).clear()
    assert (mine / "precious").exists()


def test_what_another_process_helps_to_remove_is_taken_off_the_count(transport, tmp_path) -> None:
    directory = tmp_path / "cache"
    remover = VolumeCache(directory, min_free_bytes=0)  # lives, so that nobody is alone and counts
    for file in files_of(["a", "b"]):
        remover.open(transport, file).release()
    layout = Layout(VolumeCache(directory).root)
    source = generation_name(transport.volume.url)
    os.rename(f"{layout.files}/{source}", f"{layout.trash}/{source}.00")  # a remover has come so far
    assert fill(directory, transport, files_of(["c"]), room=20) == 1
    assert fill(directory, transport, files_of(["d"]), room=20) == 1
    assert fill(directory, transport, files_of(["c", "d"]), room=20) == 0
