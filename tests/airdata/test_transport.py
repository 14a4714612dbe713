"""One contract for every driver: a directory, memory://, and a real S3 server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import uuid

import pytest

from airdata.errors import SourceChangedError, TransferError, VolumeError
from airdata.transport import FileInfo, open_transport
from airdata.transport.object_store import S3Transport, s3_arguments
from airdata.volume import Volume


@pytest.fixture(params=["directory", "memory", "s3", "s3 through obstore"])
def transport(request, tmp_path):
    if request.param == "directory":
        return open_transport(Volume.of(tmp_path / "volume"))
    if request.param == "memory":
        return open_transport(Volume.of(f"memory://{uuid.uuid4().hex}/data"))
    volume = request.getfixturevalue("s3_volume")
    return open_transport(volume) if request.param == "s3" else S3Transport(volume, everywhere=True)


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
    fast = S3Transport(s3_volume, everywhere=True)
    assert fast.read(key) == key.encode()
    assert [f.path for f in fast.list()] == [key]
    assert fast.stat(key) == open_transport(s3_volume).stat(key)


def _uses_obstore(transport, connection):
    connection.send((transport.read("a"), transport._store is not None))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_through_obstore_and_the_process_that_starts_them_does_not(method, s3_volume):
    transport = open_transport(s3_volume)
    transport.put("a", b"bytes")
    assert transport.read("a") == b"bytes"
    assert transport._store is None
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    worker = context.Process(target=_uses_obstore, args=(transport, theirs))
    worker.start()
    try:
        assert ours.poll(60), "the worker hung"
        # The tests above have used obstore in this very process, so a forked child may have to do without.
        assert ours.recv() in [(b"bytes", True), *([(b"bytes", False)] if method == "fork" else [])]
    finally:
        worker.kill()
        worker.join()


def test_options_without_a_counterpart_keep_to_s3fs():
    assert s3_arguments("s3://bucket/a/b", {"profile": "work"}, {}) is None
    assert s3_arguments("s3://bucket", {"client_kwargs": {"verify": False}}, {}) is None
    known = {
        "key": "k",
        "secret": "s",
        "token": "t",
        "endpoint_url": "http://h:1",
        "client_kwargs": {"region_name": "eu"},
    }
    arguments = s3_arguments("s3://bucket/a/b/", known, {})
    assert (
        arguments.items()
        >= {
            "bucket": "bucket",
            "prefix": "a/b",
            "access_key_id": "k",
            "secret_access_key": "s",
            "session_token": "t",
            "endpoint": "http://h:1",
            "region": "eu",
        }.items()
    )
    assert s3_arguments("s3://bucket", {"anon": True}, {})["skip_signature"] is True
    assert s3_arguments("s3://bucket", {}, {"AWS_ENDPOINT_URL": "http://h:2"})["endpoint"] == "http://h:2"


def test_a_failing_fast_path_gives_way_to_the_general_one(s3_volume, caplog):
    open_transport(s3_volume).put("a", b"bytes")
    transport = S3Transport(s3_volume, everywhere=True)
    transport._arguments = {
        **transport._arguments,
        "endpoint": "http://127.0.0.1:9",
        "retry_config": {"max_retries": 0},
    }
    assert [transport.read("a") for _ in range(4)] == [b"bytes"] * 4
    assert "obstore keeps failing" in caplog.text


def test_file_info_is_a_plain_value():
    assert FileInfo("a", 1) == FileInfo("a", 1, "")
