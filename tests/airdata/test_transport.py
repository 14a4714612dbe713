"""One contract for every driver: a directory, memory://, and a real S3 server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import uuid
from dataclasses import replace
from unittest import mock

import cloudpickle
import fsspec
import pytest
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

import airdata
from airdata.errors import SourceChangedError, TransferError, VolumeError
from airdata.transport import FileInfo, open_transport, parts
from airdata.transport.object_store import ObjectTransport
from airdata.transport.parts import LARGE_BYTES
from airdata.transport.remote import FsspecTransport
from airdata.transport.retry import Retry
from airdata.transport.store_options import plan_store
from airdata.volume import Volume


@pytest.fixture(params=["directory", "memory", "s3", "s3 through obstore"])
def transport(request, tmp_path):
    if request.param == "directory":
        return open_transport(Volume.of(tmp_path / "volume"))
    if request.param == "memory":
        return open_transport(Volume.of(f"memory://{uuid.uuid4().hex}/data"))
    volume = request.getfixturevalue("s3_volume")
    return open_transport(volume) if request.param == "s3" else ObjectTransport(volume, everywhere=True)


def test_what_is_put_is_read(transport, tmp_path):
    transport.put("a/b.bin", b"0123456789")
    source = tmp_path / "upload"
    source.write_bytes(b"x" * 70_000)
    transport.put("c.bin", source)
    assert transport.read("a/b.bin") == b"0123456789"
    assert transport.stat("c.bin").size == 70_000
    assert transport.get("c.bin", tmp_path / "download") == 70_000
    assert (tmp_path / "download").read_bytes() == source.read_bytes()
    assert transport.read_ranges("a/b.bin", [(2, 4), (9, 10), (0, 1), (3, 3)]) == [b"23", b"9", b"0", b""]


def test_empty_files_are_files(transport, tmp_path):
    transport.put("empty", b"")
    assert [(f.path, f.size) for f in transport.list()] == [("empty", 0)]
    assert transport.get("empty", tmp_path / "empty") == 0


def test_listing_is_recursive_and_relative(transport):
    for path in ("x/one", "x/y/two", "three", "xx/four"):
        transport.put(path, path.encode())
    assert sorted(f.path for f in transport.list()) == ["three", "x/one", "x/y/two", "xx/four"]
    assert sorted(f.path for f in transport.list("x")) == ["x/one", "x/y/two"]
    assert {f.path: f.size for f in transport.list()}["x/y/two"] == len("x/y/two")
    assert list(transport.list("nowhere")) == []
    assert transport.directories() == ["x", "xx"]
    assert transport.directories("x") == ["y"]
    assert transport.directories("nowhere") == []


def test_listing_and_stat_agree_on_the_version(transport):
    transport.put("a", b"one")
    listed = next(iter(transport.list()))
    assert listed == transport.stat("a")
    assert listed.version


def test_a_replaced_file_has_another_version(transport):
    transport.put("a", b"one")
    before = transport.stat("a")
    transport.put("a", b"two")
    assert transport.read("a") == b"two"
    assert transport.stat("a").version != before.version


def test_a_version_that_is_gone_is_never_served(transport, tmp_path):
    transport.put("a", b"one")
    before = transport.stat("a")
    assert transport.get("a", tmp_path / "x", before.version) == 3
    transport.put("a", b"two")
    with pytest.raises(SourceChangedError, match="replaced"):
        transport.get("a", tmp_path / "x", before.version)


def test_what_is_missing_is_file_not_found(transport, tmp_path):
    transport.put("there", b"x")
    for verb in (
        lambda: transport.stat("missing"),
        lambda: transport.read("missing"),
        lambda: transport.get("missing", tmp_path / "x"),
        lambda: transport.read_ranges("missing", [(0, 1)]),
    ):
        with pytest.raises(FileNotFoundError):
            verb()


def test_delete_is_idempotent(transport):
    transport.put("a", b"x")
    transport.delete("a")
    transport.delete("a")
    assert list(transport.list()) == []


def test_a_range_past_the_end_is_never_short_data(transport):
    transport.put("a", b"0123456789")
    with pytest.raises(TransferError, match="a"):
        transport.read_ranges("a", [(5, 20)])


def test_a_transport_travels_to_other_processes(transport):
    transport.put("a", b"x")
    again = pickle.loads(pickle.dumps(transport))
    if not str(transport.volume).startswith("memory"):
        assert again.read("a") == b"x"
    assert again.volume == transport.volume


@pytest.mark.parametrize("opened", [False, True], ids=["before its first verb", "once opened"])
@pytest.mark.parametrize(
    "environment",
    [
        {"ACCOUNT_KEY": "aGlkZGVu"},
        {"SAS_TOKEN": "sv=1&sig=aGlkZGVu"},
        {"CLIENT_ID": "i", "TENANT_ID": "t", "CLIENT_SECRET": "aGlkZGVu"},
        {"CONNECTION_STRING": "AccountName=account;AccountKey=aGlkZGVu"},
    ],
    ids=lambda environment: [*environment][-1],
)
def test_credentials_of_the_environment_are_in_no_pickle(environment, opened, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    url = "abfs://box@account.dfs.core.windows.net/a"
    transport = ObjectTransport(Volume.of(url), everywhere=True)
    assert transport.lists
    assert "aGlkZGVu" in str(plan_store(url, {}, os.environ).arguments), "obstore finds them"
    assert not opened or transport._store() is not None
    for thing in (transport, airdata.UCVolumeDataset(url)):
        assert b"aGlkZGVu" not in cloudpickle.dumps(thing)
    assert "aGlkZGVu" not in repr(vars(transport))
    assert pickle.loads(pickle.dumps(transport)).lists
    assert b"aGlkZGVu" in pickle.dumps(ObjectTransport(Volume.of(url, {"account_key": "aGlkZGVu"}))), "what was given"


def test_a_transport_takes_the_credentials_of_the_environment_it_arrives_in(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    travelling = pickle.dumps(ObjectTransport(Volume.of("abfs://box/a")))
    assert not pickle.loads(travelling).lists, "no account is named"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGlkZGVu")
    assert pickle.loads(travelling).lists


def _read_in_child(transport, connection):
    connection.send(transport.read("a"))


def test_a_forked_child_reads_after_its_parent_did(transport):
    # Event loops and connection pools of a client do not survive a fork: s3fs#914, gcsfs#379, pytorch#138957.
    transport.put("a", b"bytes")
    assert transport.read("a") == b"bytes"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(transport, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.poll(30), "the child hung"
        assert ours.recv() == b"bytes"
    finally:
        child.kill()
        child.join()


def test_paths_never_leave_a_directory(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    transport = open_transport(Volume.of(tmp_path / "volume"))
    for path in ("../secret", "a/../../secret", "/etc/passwd"):
        with pytest.raises(TransferError, match="leaves the volume"):
            transport.read(path)


def test_links_are_followed_and_loops_are_not(tmp_path):
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    (volume / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"x")
    (volume / "linked").symlink_to(elsewhere)
    (volume / "sub" / "loop").symlink_to(volume)
    (volume / "dangling").symlink_to(tmp_path / "nowhere")
    assert [f.path for f in open_transport(Volume.of(volume)).list()] == ["linked/file"]


def test_a_failed_put_leaves_the_old_content_and_no_litter(tmp_path):
    transport = open_transport(Volume.of(tmp_path))
    transport.put("a", b"old")
    with pytest.raises(FileNotFoundError):
        transport.put("a", tmp_path / "no such source")
    assert transport.read("a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_stored_is_as_shared_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        open_transport(Volume.of(tmp_path)).put("a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_scheme_without_driver_names_the_remedy():
    with pytest.raises(VolumeError, match=r"airdata\[gcs\]|no driver"):
        open_transport(Volume.of("nosuchscheme://x/y")).read("a")
    with pytest.raises(VolumeError, match="nosuchscheme"):
        list(open_transport(Volume.of("nosuchscheme://x/y")).list())


def test_a_store_that_refuses_is_an_error_that_names_the_file_and_no_secret(s3_endpoint):
    volume = Volume.of("s3://no-such-bucket/data", {"key": "k", "secret": "hidden", "endpoint_url": s3_endpoint})
    with pytest.raises((TransferError, FileNotFoundError)) as caught:
        open_transport(volume).read("a.bin")
    assert "no-such-bucket" in str(caught.value)
    assert "hidden" not in str(caught.value)


ODD_KEYS = [
    "a b",
    "ü",
    "e\u0301",
    "50%",
    "%41",
    "a#b",
    "a?b",
    "a*b",
    "[1]",
    "a+b",
    "~t",
    "a\\b",
    "a//b",
    "x/./y",
    "tab\there",
]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_obstore_reads_the_key_that_s3fs_wrote(key, s3_volume):
    open_transport(s3_volume).put(key, key.encode())
    fast = ObjectTransport(s3_volume, everywhere=True)
    assert fast.read(key) == key.encode()
    assert [f.path for f in fast.list()] == [key]
    assert fast.stat(key) == open_transport(s3_volume).stat(key)


def test_a_store_with_which_nothing_ever_works_gives_way_to_fsspec(s3_volume, proxy_of, caplog):
    open_transport(s3_volume).put("a", b"bytes")
    proxy = proxy_of(s3_volume.storage_options["endpoint_url"])
    proxy.set_faults({"header": ["User-Agent", "object_store"], "reset": 0})
    behind = replace(s3_volume, storage_options={**s3_volume.storage_options, "endpoint_url": proxy.url})
    transport = ObjectTransport(behind, everywhere=True)
    assert [transport.read("a") for _ in range(4)] == [b"bytes"] * 4
    assert "obstore keeps failing" in caplog.text
    retries = transport.retries
    assert transport.read("a") == b"bytes"
    assert transport.retries == retries, "it is not tried any more"


@pytest.mark.parametrize("folder", ["", "a", "both"])
def test_markers_of_folders_are_no_files(folder, s3_volume):
    from s3fs import S3FileSystem

    filesystem = S3FileSystem(**s3_volume.storage_options, skip_instance_cache=True)
    bucket, prefix = s3_volume.url.removeprefix("s3://").split("/", 1)
    files = {"a/b": b"x", "a/empty": b"", "both": b"", "both/c": b"x", "full": b"xx", "full/d": b"x", "zero": b""}
    markers = dict.fromkeys(["", "a/", "alone/", "both/", "full/"], b"")
    for key, content in {**files, **markers}.items():
        filesystem.call_s3("put_object", Bucket=bucket, Key=f"{prefix}/{key}", Body=content)
    expected = sorted((key, len(files[key])) for key in files if not folder or key.startswith(f"{folder}/"))
    general, fast = FsspecTransport(s3_volume), ObjectTransport(s3_volume, everywhere=True)
    listings = [general.list(folder), fast.list(folder), (file for page in fast.pages(folder) for file in page)]
    by_path = [sorted(listing, key=lambda file: file.path) for listing in listings]
    assert [(file.path, file.size) for file in by_path[0]] == expected
    assert by_path[0] == by_path[1] == by_path[2]
    assert all(general.read(file.path) == files[file.path] for file in by_path[0])


def test_markers_of_folders_are_no_files_on_azure(azure_volume):
    from azure.storage.blob import BlobServiceClient

    service = BlobServiceClient.from_connection_string(azure_volume.storage_options["connection_string"])
    container, prefix = azure_volume.url.removeprefix("abfs://").split("/", 1)
    files = {"a/b": b"x", "full": b"xx", "full/c": b"x", "zero": b""}
    markers = dict.fromkeys(["alone/", "full/", "m/"])
    folders = {"a": {"hdi_isfolder": "true"}, "Dir": {"Hdi_isfolder": "true"}, "made": {"is_directory": "true"}}
    with service, service.get_container_client(container) as client:
        for key, metadata in {**dict.fromkeys(files), **markers, **folders}.items():
            client.upload_blob(f"{prefix}/{key}", files.get(key, b""), metadata=metadata)
    expected = sorted((key, len(content)) for key, content in files.items())
    for transport in (FsspecTransport(azure_volume), ObjectTransport(azure_volume, everywhere=True)):
        assert sorted((file.path, file.size) for file in transport.list()) == expected


class BreakingFileSystem(MemoryFileSystem):
    """Memory behind a line that breaks during each of the first uploads, each time a little later."""

    protocol = "breaking"
    store, pseudo_dirs = {}, [""]
    uploads = 0

    def put_file(self, lpath, rpath, callback=DEFAULT_CALLBACK, **kwargs):
        type(self).uploads += 1
        time.sleep(0.2)
        callback.relative_update(self.uploads)
        if self.uploads < 6:
            raise ConnectionResetError("reset")
        super().put_file(lpath, rpath, callback=callback, **kwargs)


def test_an_upload_that_gets_further_each_time_is_not_given_up(tmp_path):
    fsspec.register_implementation("breaking", BreakingFileSystem, clobber=True)
    (tmp_path / "upload").write_bytes(b"bytes")
    transport = FsspecTransport(Volume.of("breaking://data"), Retry(deadline=0.5, first_wait=0.001))
    transport.put("a", tmp_path / "upload")
    assert (transport.read("a"), transport.retries) == (b"bytes", 5)


def test_a_web_server_is_read_by_both_clients_alike(counting_server, tmp_path):
    web = tmp_path / "web"
    (web / "sub").mkdir(parents=True)
    names = ["a", "sub/b", "with space", "50%", "ü"]
    for name in names:
        (web / name).write_bytes(name.encode())
    volume = Volume.of(counting_server(web).url)
    transport, fast = FsspecTransport(volume), ObjectTransport(volume, everywhere=True)
    listed = sorted(file.path for file in transport.list())
    assert listed == sorted(file.path for file in fast.list())
    assert len(listed) == len(names)
    assert [fast.read(path) for path in listed] == [transport.read(path) for path in listed]
    assert sorted(transport.read(path) for path in listed) == sorted(name.encode() for name in names)
    assert fast.stat("a") == transport.stat("a")
    assert fast.get("sub/b", tmp_path / "b", fast.stat("sub/b").version) == len("sub/b")
    with pytest.raises(FileNotFoundError):
        fast.read("missing")


def test_a_large_file_of_a_web_server_without_ranges_comes_whole(counting_server, tmp_path):
    (tmp_path / "web").mkdir()
    content = os.urandom(LARGE_BYTES + 1)
    (tmp_path / "web" / "large").write_bytes(content)
    server = counting_server(tmp_path / "web")
    for kind in (FsspecTransport, ObjectTransport):
        transport = kind(Volume.of(server.url), **({} if kind is FsspecTransport else {"everywhere": True}))
        assert transport.get("large", tmp_path / "copy", size=len(content)) == len(content)
        assert (tmp_path / "copy").read_bytes() == content


@given(size=st.integers(0, 200), part=st.integers(1, 64), threads=st.integers(1, 8))
def test_parts_cover_a_file_exactly(size, part, threads, tmp_path_factory):
    content = os.urandom(size)
    asked, arrived = [], []

    def read(piece, moved):
        asked.append(piece)
        arrived.append(moved())
        return memoryview(content)[slice(*piece)]

    target = tmp_path_factory.getbasetemp() / "parts"
    target.write_bytes(b"what was there before and is longer than the file" * 10)
    with mock.patch.multiple(parts, PART_BYTES=part, _THREADS_PER_FILE=threads):
        assert parts.fetch_parts(target, size, read) == size
    assert target.read_bytes() == content
    asked.sort()
    assert [start for start, _ in asked] == list(range(0, size, part))
    assert [end for _, end in asked] == [*range(part, size, part), *([size] if size else [])]
    assert all(0 <= done < max(size, 1) for done in arrived)


@given(bad=st.integers(0, 9), threads=st.integers(1, 8))
def test_the_first_part_that_fails_ends_a_file(bad, threads, tmp_path_factory):
    def read(piece, moved):
        if piece[0] == bad:
            raise TransferError("this part")
        return bytes(1)

    with (
        mock.patch.multiple(parts, PART_BYTES=1, _THREADS_PER_FILE=threads),
        pytest.raises(TransferError, match="this part"),
    ):
        parts.fetch_parts(tmp_path_factory.getbasetemp() / "parts", 10, read)


def test_a_part_that_arrives_too_late_is_written_nowhere(tmp_path):
    caller, started, released = threading.get_ident(), threading.Event(), threading.Event()

    def read(piece, moved):
        if threading.get_ident() == caller:
            assert started.wait(60)
            raise TransferError("this part")
        started.set()
        assert released.wait(60)
        return b"x"

    with mock.patch.multiple(parts, PART_BYTES=1, _THREADS_PER_FILE=2):
        with pytest.raises(TransferError, match="this part"):
            parts.fetch_parts(tmp_path / "copy", 2, read)
        with open(tmp_path / "next", "wb"):  # by the number that the copy's descriptor had
            released.set()
            deadline = time.monotonic() + 60
            while any(thread.name == "airdata-part" for thread in threading.enumerate()):
                assert time.monotonic() < deadline
                time.sleep(0.001)
    assert (tmp_path / "next").read_bytes() == b""


def test_file_info_is_a_plain_value():
    assert FileInfo("a", 1) == FileInfo("a", 1, "")
