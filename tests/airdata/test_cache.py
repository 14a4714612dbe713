"""The cache in one process: what stays, what passes, what is refused, what is removed."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import airdata.cache
import airdata.cache.store
from airdata.cache import CachedFile, VolumeCache, cache_info, clear_cache, open_file
from airdata.cache.usage import Limits
from airdata.errors import FetchError, SourceChangedError, TransferError
from airdata.transport import FileInfo
from airdata.transport.local import LocalTransport
from airdata.volume import Volume


class RecordingTransport(LocalTransport):
    """A directory read as if it were remote; notes which files are fetched."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Volume.of(str(directory)))
        self.fetched: list[str] = []

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        self.fetched.append(path)
        return super().get(path, destination, version)


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the machine, for this test."""
    directory = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def source(tmp_path: Path, make_files: Callable[..., dict[str, bytes]]) -> dict[str, bytes]:
    return make_files(tmp_path / "volume", 12, size=1000)


@pytest.fixture
def transport(tmp_path: Path, source: dict[str, bytes]) -> RecordingTransport:
    return RecordingTransport(tmp_path / "volume")


@pytest.fixture
def files(transport: RecordingTransport) -> list[FileInfo]:
    return sorted(transport.list(), key=lambda file: file.path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def content(lease: CachedFile) -> bytes:
    return Path(lease.local_path).read_bytes()


def names_below(directory: Path) -> list[str]:
    return [name for _, _, names in os.walk(directory) for name in names]


# --- hits and misses ---


def test_a_file_is_fetched_once_and_then_found(transport, files, source, directory) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    for expected_hit in (False, True, True):
        for file in files:
            with cache.open(transport, file) as lease:
                assert lease.hit is expected_hit
                assert content(lease) == source[file.path]
                assert lease.size == file.size
                assert lease.local_path.endswith("/" + file.path)
    assert sorted(transport.fetched) == sorted(source)


def test_another_run_finds_what_the_first_has_fetched(transport, files, directory) -> None:
    VolumeCache(directory, min_free_bytes=0).open(transport, files[0]).release()
    assert VolumeCache(directory, min_free_bytes=0).open(transport, files[0]).hit


def test_a_copy_that_travelled_by_pickle_uses_the_same_cache(transport, files, directory) -> None:
    cache = VolumeCache(directory, max_bytes=10_000_000, min_free_bytes=0)
    cache.open(transport, files[0]).release()
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.limits == cache.limits
    assert copy.open(transport, files[0]).hit


def test_a_changed_source_is_another_entry_and_the_old_path_keeps_its_bytes(
    transport, files, source, directory, tmp_path
) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    old = cache.open(transport, files[0])
    new_bytes = bytes(reversed(source[files[0].path]))
    target = tmp_path / "volume" / files[0].path
    target.write_bytes(new_bytes)
    os.utime(target, ns=(1, 1))
    new = cache.open(transport, transport.stat(files[0].path))
    assert not new.hit
    assert content(new) == new_bytes
    assert content(old) == source[files[0].path]


def test_an_empty_file_is_a_file(transport, directory, tmp_path) -> None:
    (tmp_path / "volume" / "empty.txt").touch()
    cache = VolumeCache(directory, min_free_bytes=0)
    for expected_hit in (False, True):
        with cache.open(transport, transport.stat("empty.txt")) as lease:
            assert lease.hit is expected_hit
            assert content(lease) == b""


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 5000])
def test_an_entry_of_another_size_is_fetched_again(transport, files, source, directory, damage) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    with cache.open(transport, files[0]) as lease:
        Path(lease.local_path).write_bytes(damage)
    with cache.open(transport, files[0]) as lease:
        assert not lease.hit
        assert content(lease) == source[files[0].path]


def test_threads_that_ask_for_one_file_cost_one_fetch(transport, files, directory) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    gate = threading.Barrier(8)
    hits: list[bool] = []

    def ask() -> None:
        gate.wait()
        hits.append(cache.open(transport, files[0]).hit)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(hits) == [False] + [True] * 7
    assert transport.fetched == [files[0].path]


# --- never a wrong byte ---


def test_a_source_of_another_size_is_a_changed_source(transport, files, directory, tmp_path) -> None:
    (tmp_path / "volume" / files[0].path).write_bytes(b"other")
    unversioned = FileInfo(files[0].path, files[0].size)
    with pytest.raises(SourceChangedError, match=f"{files[0].path}.*listed with {files[0].size} bytes and 5 came"):
        VolumeCache(directory, min_free_bytes=0).open(transport, unversioned)
    assert names_below(directory / "files") == names_below(directory / "parts") == []


def test_a_source_of_the_same_size_and_another_version_is_a_changed_source(
    transport, files, directory, tmp_path
) -> None:
    os.utime(tmp_path / "volume" / files[0].path, ns=(1, 1))
    with pytest.raises(SourceChangedError, match="replaced since the listing"):
        VolumeCache(directory, min_free_bytes=0).open(transport, files[0])
    assert names_below(directory / "files") == []


def test_a_vanished_source_is_a_changed_source(transport, files, directory, tmp_path) -> None:
    (tmp_path / "volume" / files[0].path).unlink()
    with pytest.raises(SourceChangedError, match="is gone"):
        VolumeCache(directory, min_free_bytes=0).open(transport, files[0])


def test_a_failed_fetch_leaves_no_promise_behind(transport, files, source, directory, tmp_path) -> None:
    limit = sum(map(len, source.values()))
    cache = VolumeCache(directory, max_bytes=limit, min_free_bytes=0)
    (tmp_path / "volume" / files[0].path).rename(tmp_path / "aside")
    for _ in range(5):
        with pytest.raises(SourceChangedError):
            cache.open(transport, files[0])
    (tmp_path / "aside").rename(tmp_path / "volume" / files[0].path)
    for file in files:
        cache.open(transport, file).release()
    assert cache.info().bytes == limit


# --- limits ---


def test_a_full_cache_keeps_what_it_has_and_lets_the_rest_pass(transport, files, source, directory) -> None:
    half = sum(file.size for file in files[:6])
    cache = VolumeCache(directory, max_bytes=half, min_free_bytes=0)
    for _epoch in range(3):
        for file in files:
            with cache.open(transport, file) as lease:
                assert content(lease) == source[file.path]
                assert lease.local_path.endswith("/" + file.path)
    assert cache.info().bytes == half
    assert names_below(directory / "transient") == []
    # Epochs two and three read the second half only: keeping is the optimum.
    assert sorted(transport.fetched) == sorted([f.path for f in files] + 2 * [f.path for f in files[6:]])


def test_a_passing_file_is_shared_and_goes_with_its_last_reader(transport, files, directory) -> None:
    cache = VolumeCache(directory, max_bytes=0)
    first, second = cache.open(transport, files[0]), cache.open(transport, files[0])
    assert (first.hit, second.hit) == (False, True)
    first.release()
    first.release()
    assert os.path.exists(second.local_path)
    second.release()
    assert os.listdir(directory / "transient") == []


def test_a_file_larger_than_the_limit_passes_and_smaller_ones_stay(transport, files, directory, tmp_path) -> None:
    (tmp_path / "volume" / "large.bin").write_bytes(b"x" * 50_000)
    cache = VolumeCache(directory, max_bytes=20_000, min_free_bytes=0)
    with cache.open(transport, transport.stat("large.bin")) as lease:
        assert lease.size == 50_000
    cache.open(transport, files[0]).release()
    assert cache.open(transport, files[0]).hit


def test_the_free_disk_floor_is_kept(transport, files, directory) -> None:
    cache = VolumeCache(directory, min_free_bytes=1 << 60)
    cache.open(transport, files[0]).release()
    assert cache.info().files == 0


class Disk:
    """A state of a disk: 1,000 blocks of 1 MB, a given number of them free."""

    f_blocks, f_frsize, f_files = 1000, 1_000_000, 0

    def __init__(self, free: int, *, inodes: int = 0, free_inodes: int = 0) -> None:
        self.f_bavail, self.f_files, self.f_favail = free, inodes, free_inodes


@pytest.mark.parametrize(
    ("limits", "used", "promised", "disk", "allowed"),
    [
        (Limits(None, 0), 0, 0, Disk(2), True),
        (Limits(None, 0), 0, 1_500_000, Disk(2), False),
        (Limits(None, 0), 0, 0, Disk(0), False),
        (Limits(None, 100_000_000), 0, 0, Disk(102), True),
        (Limits(None, 100_000_000), 0, 0, Disk(100), False),
        (Limits(None, None), 0, 0, Disk(999), False),  # the floor is 10 GiB at least
        (Limits(3_000_000, 0), 2_000_000, 0, Disk(999), True),
        (Limits(3_000_000, 0), 2_000_000, 1, Disk(999), False),
        (Limits(0, 0), 0, 0, Disk(999), False),
        (Limits(None, 0), 0, 0, Disk(999, inodes=1000, free_inodes=40), False),
        (Limits(None, 0), 0, 0, Disk(999, inodes=1000, free_inodes=400), True),
    ],
)
def test_what_the_limits_allow(limits, used, promised, disk, allowed) -> None:
    assert limits.allow(1_000_000, used, promised, disk) is allowed


def test_the_default_floor_is_a_tenth_of_a_large_disk() -> None:
    disk = Disk(0)
    disk.f_blocks = 1_000_000
    assert Limits().floor(disk) == 100_000_000_000


@pytest.mark.parametrize(
    ("text", "number"), [("5000", 5000), ("500MB", 500_000_000), ("1.5 GiB", 1_610_612_736), ("2k", 2000), ("7 b", 7)]
)
def test_limits_come_from_the_environment(monkeypatch, text, number) -> None:
    monkeypatch.setenv("AIRDATA_CACHE_BYTES", text)
    monkeypatch.setenv("AIRDATA_MIN_FREE_BYTES", text)
    assert VolumeCache().limits == Limits(number, number)
    assert VolumeCache(max_bytes=1, min_free_bytes=2).limits == Limits(1, 2)


@pytest.mark.parametrize("text", ["lots", "-5", "5 parsecs"])
def test_a_limit_that_is_no_number_is_named(monkeypatch, text) -> None:
    monkeypatch.setenv("AIRDATA_CACHE_BYTES", text)
    with pytest.raises(ValueError, match="AIRDATA_CACHE_BYTES"):
        VolumeCache()


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes=-1"):
        VolumeCache(max_bytes=-1)


# --- making room between runs ---


def volume_of(tmp_path: Path, make_files, name: str) -> tuple[RecordingTransport, list[FileInfo], int]:
    make_files(tmp_path / name, 4, size=1000)
    transport = RecordingTransport(tmp_path / name)
    files = sorted(transport.list(), key=lambda file: file.path)
    return transport, files, sum(file.size for file in files)


def fill(cache: VolumeCache, transport: RecordingTransport, files: list[FileInfo]) -> None:
    for file in files:
        cache.open(transport, file).release()


def test_a_new_run_removes_the_source_unused_longest(tmp_path, make_files, directory) -> None:
    one, two, three = (volume_of(tmp_path, make_files, name) for name in ("one", "two", "three"))
    size = one[2] + two[2]
    for transport, files, _ in (one, two):
        fill(VolumeCache(directory, max_bytes=size, min_free_bytes=0), transport, files)
    fill(VolumeCache(directory, max_bytes=size, min_free_bytes=0), three[0], three[1])
    held = {source.source.rsplit("/", 1)[1]: source.files for source in cache_info(directory).sources if source.files}
    assert held == {"two": 4, "three": 4}


def test_a_source_that_is_read_is_not_removed(tmp_path, make_files, directory) -> None:
    one, two = (volume_of(tmp_path, make_files, name) for name in ("one", "two"))
    cache = VolumeCache(directory, max_bytes=one[2], min_free_bytes=0)
    fill(cache, *one[:2])
    lease = cache.open(one[0], one[1][0])
    fill(VolumeCache(directory, max_bytes=one[2], min_free_bytes=0), *two[:2])
    assert os.path.exists(lease.local_path)
    assert len(one[0].fetched) == 4
    lease.release()


def test_two_sources_of_one_run_do_not_drive_each_other_out(tmp_path, make_files, directory) -> None:
    train, valid = (volume_of(tmp_path, make_files, name) for name in ("train", "valid"))
    cache = VolumeCache(directory, max_bytes=train[2], min_free_bytes=0)
    for _epoch in range(3):
        fill(cache, *train[:2])
        fill(cache, *valid[:2])
    assert len(train[0].fetched) == 4


def change(directory: Path, files: list[FileInfo], day: int) -> None:
    for file in files:
        path = directory / file.path
        path.write_bytes(bytes([day]) * file.size)
        os.utime(path, ns=(day, day))


def test_a_source_that_changes_every_day_does_not_fill_the_cache_with_dead_versions(
    tmp_path, make_files, directory
) -> None:
    transport, files, size = volume_of(tmp_path, make_files, "daily")
    for day in range(1, 5):
        change(tmp_path / "daily", files, day)
        listed = sorted(transport.list(), key=lambda file: file.path)
        clear_looked_at(directory)  # a day has passed
        # Room for one day and a half, so the third day finds none unless the first has made it.
        cache = VolumeCache(directory, max_bytes=size * 3 // 2, min_free_bytes=0)
        fill(cache, transport, listed)
        transport.fetched.clear()
        fill(cache, transport, listed)
        if day != 2:
            assert len(transport.fetched) <= len(files) // 2, f"day {day}"
    assert cache.info().bytes <= size * 3 // 2


def clear_looked_at(directory: Path) -> None:
    import diskcache

    if (directory / "catalogue").is_dir():
        with diskcache.Cache(directory / "catalogue") as catalogue:
            for key in list(catalogue):
                if str(key).startswith("looked at"):
                    del catalogue[key]


def test_an_old_version_that_is_read_stays(tmp_path, make_files, directory) -> None:
    transport, files, size = volume_of(tmp_path, make_files, "daily")
    old = VolumeCache(directory, max_bytes=size, min_free_bytes=0)
    fill(old, transport, files)
    lease = old.open(transport, files[0])
    change(tmp_path / "daily", files, 1)
    new = VolumeCache(directory, max_bytes=size, min_free_bytes=0)
    fill(new, transport, sorted(transport.list(), key=lambda file: file.path))
    assert os.path.exists(lease.local_path)
    assert cache_info(directory).files == len(files)
    lease.release()


def test_what_was_not_read_for_weeks_makes_room_and_the_rest_stays(tmp_path, make_files, directory) -> None:
    transport, files, size = volume_of(tmp_path, make_files, "window")
    fill(VolumeCache(directory, max_bytes=size, min_free_bytes=0), transport, files)
    long_ago = Path(directory).stat().st_mtime_ns - 30 * 24 * 3600 * 10**9
    for path in (directory / "files").rglob(os.path.basename(files[0].path)):
        os.utime(path, ns=(long_ago, path.stat().st_mtime_ns))
    cache = VolumeCache(directory, max_bytes=size, min_free_bytes=0)
    assert [cache.find(transport, file) is not None for file in files] == [False, True, True, True]


def test_a_cache_with_room_keeps_old_versions(tmp_path, make_files, directory) -> None:
    transport, files, _ = volume_of(tmp_path, make_files, "daily")
    fill(VolumeCache(directory, min_free_bytes=0), transport, files)
    change(tmp_path / "daily", files, 1)
    changed = sorted(transport.list(), key=lambda file: file.path)
    fill(VolumeCache(directory, min_free_bytes=0), transport, changed)
    assert all(VolumeCache(directory, min_free_bytes=0).find(transport, file) for file in [*files, *changed])


def test_find_answers_only_with_what_is_here(transport, files, source, directory) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    assert cache.find(transport, files[0]) is None
    cache.open(transport, files[0]).release()
    lease = cache.find(transport, files[0])
    assert lease is not None
    assert lease.hit
    assert content(lease) == source[files[0].path]
    assert clear_cache(directory) == 0, "it is leased"
    lease.release()
    Path(lease.local_path).write_bytes(b"damaged")
    assert cache.find(transport, files[0]) is None
    assert clear_cache(directory) > 0
    assert transport.fetched == [files[0].path]


def test_find_in_a_directory_that_cannot_be_used_finds_nothing_and_says_nothing(
    transport, files, directory, caplog
) -> None:
    directory.write_text("not a directory")
    assert VolumeCache(directory).find(transport, files[0]) is None
    assert caplog.records == []


# --- the directory ---


def test_info_and_clear_of_a_cache_that_was_never_used(directory) -> None:
    info = cache_info(directory)
    assert (info.bytes, info.files, info.sources) == (0, 0, ())
    assert info.free_bytes > 0
    assert clear_cache(directory) == 0
    assert not directory.exists()


def test_clear_removes_what_nobody_reads(transport, files, directory) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    fill(cache, transport, files)
    lease = cache.open(transport, files[0])
    assert clear_cache(directory) == 0
    lease.release()
    assert clear_cache(directory) == sum(file.size for file in files)
    assert cache_info(directory).files == 0
    assert not cache.open(transport, files[0]).hit


def test_clear_touches_nothing_that_is_not_the_caches_own(transport, files, directory, tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    cache = VolumeCache(directory, min_free_bytes=0)
    fill(cache, transport, files)
    generation = next((directory / "files").iterdir())
    (generation / "link").symlink_to(precious)
    (generation / "file").symlink_to(precious / "thesis.txt")
    (directory / "files" / "notes").write_text("mine")
    (directory / "transient" / "notes").mkdir()
    (directory / "README").write_text("mine")
    clear_cache(directory)
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert (directory / "files" / "notes").exists()
    assert (directory / "transient" / "notes").exists()
    assert (directory / "README").exists()


def test_a_directory_with_the_users_files_gets_a_folder_for_the_cache(transport, files, directory) -> None:
    directory.mkdir(mode=0o755)
    (directory / "thesis.txt").write_text("years of work")
    fill(VolumeCache(directory, min_free_bytes=0), transport, files)
    assert sorted(os.listdir(directory)) == ["airdata", "thesis.txt"]
    assert directory.stat().st_mode & 0o777 == 0o755
    assert cache_info(directory).files == len(files)
    assert clear_cache(directory) > 0
    assert (directory / "thesis.txt").exists()


def test_a_manifest_that_came_first_does_not_make_the_directory_foreign(transport, files, directory) -> None:
    (directory / "manifests").mkdir(parents=True)
    fill(VolumeCache(directory, min_free_bytes=0), transport, files)
    assert VolumeCache(directory).root == str(directory)
    assert (directory / "files").is_dir()


def test_the_root_is_private(transport, files, directory) -> None:
    VolumeCache(directory, min_free_bytes=0).open(transport, files[0]).release()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_the_default_directory(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("AIRDATA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert VolumeCache().directory == str(tmp_path / "airdata")
    monkeypatch.setenv("AIRDATA_CACHE_DIR", str(tmp_path / "mine"))
    assert VolumeCache().directory == str(tmp_path / "mine")
    assert VolumeCache(tmp_path / "given").directory == str(tmp_path / "given")


# --- in place, and without a cache ---


def test_files_of_a_plain_local_directory_are_read_in_place(transport, files, source, directory) -> None:
    for cache in (None, VolumeCache(directory)):
        with open_file(cache, transport, files[0]) as lease:
            assert lease.hit
            assert lease.local_path == f"{transport.volume.directory}/{files[0].path}"
        assert os.path.exists(lease.local_path)
    assert transport.fetched == []
    assert not directory.exists()


def test_in_place_files_are_checked(transport, files, tmp_path) -> None:
    (tmp_path / "volume" / files[0].path).write_bytes(b"other")
    with pytest.raises(SourceChangedError, match="has 5"):
        open_file(None, transport, files[0])
    (tmp_path / "volume" / files[1].path).unlink()
    with pytest.raises(SourceChangedError, match="is gone"):
        open_file(None, transport, files[1])
    with pytest.raises(TransferError, match="leaves the volume"):
        open_file(None, transport, FileInfo("../secret", 1))


def test_without_a_cache_a_remote_file_is_temporary(s3_volume, scratch) -> None:
    from airdata.transport import open_transport

    transport = open_transport(s3_volume)
    transport.put("cats/tom.jpg", b"meow")
    with open_file(None, transport, transport.stat("cats/tom.jpg")) as lease:
        assert lease.local_path.endswith("/cats/tom.jpg")
        assert lease.local_path.startswith(str(scratch))
        assert content(lease) == b"meow"
    assert not os.path.exists(lease.local_path)
    with pytest.raises(SourceChangedError, match=r"cats/none\.jpg"):
        open_file(None, transport, FileInfo("cats/none.jpg", 4, ""))


# --- a directory that cannot be used ---


def test_another_users_directory_is_refused_and_the_run_goes_on(transport, files, source, directory, caplog) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a directory to another user")
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    cache = VolumeCache(directory)
    with caplog.at_level(logging.WARNING, logger="airdata"):
        for file in files:
            with cache.open(transport, file) as lease:
                assert content(lease) == source[file.path]
    assert len(caplog.records) == 1
    assert "belongs to another user" in caplog.text
    assert os.listdir(directory) == []


def test_a_file_in_place_of_the_directory(transport, files, source, directory, caplog) -> None:
    directory.write_text("not a directory")
    with VolumeCache(directory).open(transport, files[0]) as lease:
        assert content(lease) == source[files[0].path]
    assert directory.read_text() == "not a directory"
    assert len(caplog.records) == 1


def test_a_folder_of_the_cache_that_is_a_link_is_refused(transport, files, source, directory, tmp_path) -> None:
    VolumeCache(directory, min_free_bytes=0).open(transport, files[0]).release()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / ("a" * 32)).mkdir()
    os.rmdir(directory / "transient")
    (directory / "transient").symlink_to(tmp_path / "precious")
    with VolumeCache(directory).open(transport, files[1]) as lease:
        assert content(lease) == source[files[1].path]
    assert os.listdir(tmp_path / "precious") == ["a" * 32]


def test_a_cache_removed_while_in_use_costs_a_warning(transport, files, source, directory, caplog) -> None:
    import shutil

    cache = VolumeCache(directory, min_free_bytes=0)
    cache.open(transport, files[0]).release()
    shutil.rmtree(directory)
    for file in files:
        with cache.open(transport, file) as lease:
            assert content(lease) == source[file.path]
    assert len(caplog.records) == 1
    assert str(directory) in caplog.text


def test_no_place_at_all_is_an_error_that_says_what_to_do(transport, files, directory, tmp_path, monkeypatch) -> None:
    directory.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(directory / "none"))
    monkeypatch.setattr(airdata.cache, "_MEMORY", str(directory / "none either"))
    with pytest.raises(FetchError, match="no place on this machine") as caught:
        VolumeCache(directory).open(transport, files[0])
    assert caught.value.path == files[0].path
    assert "TMPDIR" in str(caught.value)


@pytest.fixture
def useless_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    # No filesystem of this kind can be mounted here, so the answer of the probe is given.
    monkeypatch.setattr(airdata.cache.store, "locks_exclude", lambda path: False)


@pytest.mark.usefixtures("useless_locks")
def test_locks_that_do_not_exclude_lead_to_a_private_cache(transport, files, source, directory, caplog) -> None:
    cache = VolumeCache(directory, min_free_bytes=0)
    for expected_hit in (False, True):
        with cache.open(transport, files[0]) as lease:
            assert lease.hit is expected_hit
            assert lease.local_path.startswith(tempfile.gettempdir())
            assert content(lease) == source[files[0].path]
    assert "locks between processes do not work" in caplog.text
