"""The manifest: what a volume holds, frozen, sorted and shared."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata import lister
from airdata.errors import EmptyListingError, ManifestError
from airdata.lister import ListerError, list_apart, order_for
from airdata.manifest import Manifest, reading
from airdata.manifest.listing import launch_key, list_volume, map_shared
from airdata.manifest.patterns import Selection
from airdata.manifest.reading import read_listing
from airdata.transport import FileInfo, open_transport
from airdata.volume import Volume

names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=12)
infos = st.builds(FileInfo, names, st.integers(0, 2**40), st.text(max_size=5))


def of(directory, pattern=None, **options) -> Manifest:
    return read_listing(open_transport(Volume.of(str(directory))), Selection(pattern, **options), wait=0)


def paths(manifest: Manifest) -> list[str]:
    return [file.path for file in manifest]


@given(st.lists(infos, max_size=30, unique_by=lambda info: info.path))
def test_a_manifest_holds_what_was_listed_sorted_by_the_bytes_of_the_path(files) -> None:
    manifest = Manifest.from_files(files)
    assert list(manifest) == sorted(files, key=lambda file: file.path.encode())
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert Manifest.from_files(reversed(files)).fingerprint == manifest.fingerprint
    assert manifest.total_bytes == sum(file.size for file in files)


@given(st.lists(infos, min_size=1, max_size=8, unique_by=lambda info: info.path), st.data())
def test_the_fingerprint_changes_with_any_value_and_says_which(files, data) -> None:
    number = data.draw(st.integers(0, len(files) - 1))
    old = files[number]
    changed = {
        "paths": FileInfo(old.path + "x", old.size, old.version),
        "sizes": FileInfo(old.path, old.size + 1, old.version),
        "versions": FileInfo(old.path, old.size, old.version + "x"),
    }
    before = Manifest.from_files(files)
    for what, file in changed.items():
        after = Manifest.from_files([*files[:number], file, *files[number + 1 :]])
        if len(after) == len(before):
            assert what in after.difference(before.fingerprint)
    assert before.difference(before.fingerprint) == ""


def test_values_that_run_into_each_other_do_not_share_a_fingerprint() -> None:
    assert Manifest.from_paths(["ab", "c"]).fingerprint != Manifest.from_paths(["a", "bc"]).fingerprint


@given(st.lists(infos, max_size=20, unique_by=lambda info: info.path))
def test_a_mapped_manifest_is_the_written_one(tmp_path_factory, files) -> None:
    manifest = Manifest.from_files(files, "s3://bucket/data")
    file = str(tmp_path_factory.mktemp("m") / "m.arrow")
    mapped = manifest.write(file)
    assert list(mapped) == list(manifest)
    assert (mapped.fingerprint, mapped.source) == (manifest.fingerprint, "s3://bucket/data")
    assert len(pickle.dumps(mapped)) < 300  # it pickles as the name of its file


def test_a_file_that_lost_its_manifest_is_named(tmp_path) -> None:
    mapped = Manifest.from_paths(["a"]).write(str(tmp_path / "m.arrow"))
    data = pickle.dumps(mapped)
    (tmp_path / "m.arrow").unlink()
    with pytest.raises(ManifestError, match=r"m\.arrow"):
        pickle.loads(data)


def test_save_and_load_keep_everything_also_other_columns(tmp_path) -> None:
    manifest = Manifest.from_paths(
        ["b", "a", "é"], sizes=[1, 2, 3], versions=["x", "y", "z"], columns={"label": ["B", "A", "E"]}
    )
    manifest.save(tmp_path / "kept" / "m.parquet")
    loaded = Manifest.load(tmp_path / "kept" / "m.parquet")
    assert loaded == manifest
    assert loaded.fingerprint == manifest.fingerprint
    assert [loaded.columns(row)["label"] for row in range(3)] == ["A", "B", "E"]


def test_save_and_load_reach_a_store(s3_volume) -> None:
    manifest = Manifest.from_paths(["a", "b"], sizes=[1, 2])
    manifest.save(f"{s3_volume.url}/m.parquet", s3_volume.storage_options)
    assert Manifest.load(f"{s3_volume.url}/m.parquet", s3_volume.storage_options) == manifest


@pytest.mark.parametrize("content", [b"", b"nonsense" * 10])
def test_something_else_is_no_manifest(tmp_path, content) -> None:
    (tmp_path / "m.parquet").write_bytes(content)
    with pytest.raises(ManifestError, match=r"m\.parquet"):
        Manifest.load(tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="no such manifest"):
        Manifest.load(tmp_path / "missing.parquet")


@pytest.mark.parametrize("bad", ["/etc/passwd", "../x", "a/../b", "", "a\0b"])
def test_paths_that_leave_the_volume_are_refused(bad) -> None:
    with pytest.raises(ManifestError, match="inside the volume"):
        Manifest.from_paths(["ok", bad])


def test_columns_of_another_length_and_repeated_paths_are_refused() -> None:
    with pytest.raises(ManifestError, match="2 paths and 1 values of 'size'"):
        Manifest.from_paths(["a", "b"], sizes=[1])
    with pytest.raises(ManifestError, match="1 of 3 paths"):
        Manifest.from_paths(["a", "b", "a"])


def test_indexing_is_that_of_a_sequence() -> None:
    manifest = Manifest.from_paths(["a", "b", "c"])
    assert [manifest[-1].path, *(file.path for file in manifest[:2])] == ["c", "a", "b"]
    with pytest.raises(IndexError):
        manifest[3]


# --- listing ---


def test_folders_inside_folders_are_found_and_markers_are_left_out_and_counted(tmp_path, caplog) -> None:
    for name in ("a.jpg", "d/b.jpg", "d/e/f/c.jpg", "_SUCCESS", "d/.DS_Store", "d/x.crc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level(logging.INFO, "airdata"):
        assert paths(of(tmp_path)) == ["a.jpg", "d/b.jpg", "d/e/f/c.jpg"]
    assert "3 files" in caplog.text
    assert "3 hidden" in caplog.text
    assert paths(of(tmp_path, recursive=False)) == ["a.jpg"]
    assert paths(of(tmp_path, "d/**")) == ["d/b.jpg", "d/e/f/c.jpg"]
    assert paths(of(tmp_path, ["*.jpg", "d/*.jpg"])) == ["a.jpg", "d/b.jpg"]
    assert paths(of(tmp_path, "d/.DS_Store")) == ["d/.DS_Store"]


def test_a_name_that_is_no_text_is_still_a_file(tmp_path) -> None:
    raw = os.fsencode(str(tmp_path)) + b"/\xff\xfe.bin"
    with open(raw, "wb") as file:
        file.write(b"x")
    manifest = of(tmp_path)
    assert os.fsencode(manifest[0].path) == b"\xff\xfe.bin"
    assert list(pickle.loads(pickle.dumps(manifest))) == list(manifest)


def test_a_prefix_is_pushed_down_to_the_store(s3_volume) -> None:
    transport = open_transport(s3_volume)
    for name in ("train/a/1.bin", "train/b/2.bin", "test/3.bin"):
        transport.put(name, b"12345")
    asked: list[str] = []

    class Asked:
        volume = s3_volume

        def list(self, prefix=""):
            asked.append(prefix)
            return transport.list(prefix)

    manifest = read_listing(Asked(), Selection("train/**/*.bin"), wait=0)
    assert paths(manifest) == ["train/a/1.bin", "train/b/2.bin"]
    assert asked == ["train"]
    assert {file.size for file in manifest} == {5}
    assert all(file.version for file in manifest)


def test_an_empty_listing_names_path_and_pattern_and_what_is_there_instead(tmp_path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.png").write_bytes(b"x")
    with pytest.raises(EmptyListingError, match=r"\*\.jpg.*1 files have other names") as caught:
        of(tmp_path, "*.jpg")
    assert str(tmp_path) in str(caught.value)
    assert "**/*" in str(caught.value)
    with pytest.raises(EmptyListingError, match="no files at all"):
        of(tmp_path / "missing")


def test_an_empty_listing_is_asked_again_since_mounts_lag_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "EMPTY_WAIT", 60.0)
    looked = threading.Event()
    transport = open_transport(Volume.of(str(tmp_path)))
    inner = transport.list

    def list_and_tell(prefix=""):
        yield from inner(prefix)
        looked.set()

    transport.list = list_and_tell  # type: ignore[method-assign]

    def write_late() -> None:
        assert looked.wait(30)
        (tmp_path / "late").write_bytes(b"x")

    writer = threading.Thread(target=write_late)
    writer.start()
    assert paths(read_listing(transport, Selection())) == ["late"]
    writer.join()


def test_a_second_dataset_of_one_program_sees_new_files(tmp_path) -> None:
    data, kept = tmp_path / "data", str(tmp_path / "manifests")
    data.mkdir()
    (data / "a").write_bytes(b"x")
    transport = open_transport(Volume.of(str(data)))
    assert paths(list_volume(transport, Selection(), kept)) == ["a"]
    (data / "b").write_bytes(b"x")
    assert paths(list_volume(transport, Selection(), kept)) == ["a", "b"]


def test_a_directory_that_cannot_be_written_costs_only_the_sharing(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_bytes(b"x")
    transport = open_transport(Volume.of(str(data)))
    assert paths(list_volume(transport, Selection(), str(tmp_path / "file" / "manifests"))) == ["a"]


def test_old_manifests_are_swept_and_nothing_else_is(tmp_path) -> None:
    data, kept = tmp_path / "data", tmp_path / "manifests"
    data.mkdir()
    kept.mkdir()
    (data / "a").write_bytes(b"x")
    for name in ("old.arrow", "old.txt", "new.arrow"):
        (kept / name).write_bytes(b"x")
    for name in ("old.arrow", "old.txt"):
        os.utime(kept / name, (1, 1))
    list_volume(open_transport(Volume.of(str(data))), Selection(), str(kept))
    left = {name for name in os.listdir(kept) if len(name) < 20}
    assert left == {"old.txt", "new.arrow"}


def test_only_ranks_of_one_launcher_share_a_listing() -> None:
    launched = {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1234"}
    assert launch_key({}) is None
    assert launch_key({"LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1234"}) is None
    assert launch_key(launched) == launch_key(dict(launched))
    assert launch_key(launched) != launch_key({**launched, "MASTER_PORT": "1235"})
    assert launch_key(launched) != launch_key({**launched, "TORCHELASTIC_RESTART_COUNT": "1"})


def test_ranks_of_a_node_list_once_and_map_the_same_file(ranks, volume) -> None:
    code = """
        import json, sys
        from airdata import UCVolumeDataset
        from airdata.transport.local import LocalTransport
        listed, inner = [], LocalTransport.list
        def list_and_count(self, prefix=""):
            listed.append(prefix)
            return inner(self, prefix)
        LocalTransport.list = list_and_count
        manifest = UCVolumeDataset(sys.argv[1]).manifest
        print(json.dumps([len(listed), len(manifest), manifest._file]))
    """
    printed = [json.loads(output) for output in ranks(code, 4, volume(12))]
    assert sorted(count for count, _, _ in printed) == [0, 0, 0, 1]
    assert {(files, file) for _, files, file in printed} == {(12, printed[0][2])}


def test_the_manifest_directory_is_private(tmp_path, volume) -> None:
    from airdata import UCVolumeDataset

    dataset = UCVolumeDataset(volume(3), cache_dir=tmp_path / "cache")
    assert len(dataset.manifest) == 3
    directory = os.path.dirname(dataset.manifest._file)
    assert os.stat(directory).st_mode & 0o077 == 0


def test_a_large_manifest_is_mapped_from_one_file_by_all_who_were_given_the_same(tmp_path) -> None:
    names, kept = [f"{number:08d}" for number in range(100_000)], str(tmp_path / "kept")
    labels = [number % 7 for number in range(100_000)]
    manifest = Manifest.from_paths(names, columns={"label": labels})
    first, second = map_shared(manifest, kept), map_shared(Manifest.from_paths(names, columns={"label": labels}), kept)
    [file] = [name for name in os.listdir(kept) if name.endswith(".arrow")]
    assert first == second == manifest
    assert first._file == second._file == os.path.join(kept, file)
    assert len(pickle.dumps(first)) < 300
    assert map_shared(first, kept) is first
    other = map_shared(Manifest.from_paths(names, columns={"label": labels[::-1]}), kept)
    assert other._file != first._file  # the same files with other labels
    assert other.columns(0) == {"label": labels[-1]}


def test_a_small_manifest_or_one_without_a_directory_travels_as_it_is(tmp_path) -> None:
    small, large = Manifest.from_paths(["a"]), Manifest.from_paths([f"{number:08d}" for number in range(100_000)])
    assert map_shared(small, str(tmp_path)) is small
    assert map_shared(large, None) is large
    (tmp_path / "file").write_bytes(b"x")
    assert map_shared(large, str(tmp_path / "file" / "kept")) is large


def test_a_source_that_was_changed_is_kept(tmp_path) -> None:
    manifest = Manifest.from_files([FileInfo("a", 1)], "s3://bucket/data")
    manifest.source = ""
    assert manifest.write(str(tmp_path / "m.arrow")).source == ""


# --- listing a bucket in a process of its own ---

AWKWARD = [
    "a b",
    "c%20d",
    "e+f",
    "g#h?i",
    "é/ü",
    "~",
    "a&b<c>'d\"",
    "x:y",
    "z=1/part 0",
    "日本/語",
    "_SUCCESS",
    "d/.DS_Store",
]


@pytest.fixture
def bucket(s3_volume) -> Volume:
    transport = open_transport(s3_volume)
    for number, name in enumerate([*AWKWARD, *(f"train/{number:03d}" for number in range(30)), "trainer/x"]):
        transport.put(name, b"x" * number)
    return s3_volume


def listed_by_fsspec(volume: Volume, selection: Selection) -> Manifest:
    """With an option that is an object, which cannot be sent to a child."""
    from aiobotocore.session import AioSession

    options = {**volume.storage_options, "session": AioSession()}
    transport = open_transport(Volume(volume.url, volume.name, options))
    assert order_for(transport, selection.prefixes) is None
    return read_listing(transport, selection, wait=0)


@pytest.mark.parametrize("pattern", [None, "train/*", ["train/00*", "é/*"], "**/.DS_Store", lambda path: "a" in path])
def test_both_ways_to_list_a_bucket_give_the_same_manifest_bit_for_bit(bucket, pattern, caplog) -> None:
    selection = Selection(pattern)
    with caplog.at_level(logging.INFO, "airdata"):
        apart = read_listing(open_transport(bucket), selection, wait=0)
        counted = [text.partition("(")[2] for text in caplog.messages]
        caplog.clear()
        general = listed_by_fsspec(bucket, selection)
    assert counted == [text.partition("(")[2] for text in caplog.messages]  # one line each, of the same counts
    assert apart == general
    assert (apart.fingerprint, apart.source) == (general.fingerprint, general.source)
    assert all(file.version.startswith("etag:") for file in apart)


def test_a_bucket_is_listed_without_any_client_in_this_process(bucket, program, finish) -> None:
    code = """
        import json, sys
        from airdata import UCVolumeDataset
        print(len(UCVolumeDataset(sys.argv[1], storage_options=json.loads(sys.argv[2])).manifest))
        print([name for name in ("s3fs", "obstore", "botocore", "torch.cuda") if name in sys.modules])
    """
    printed = finish(program(code, bucket.url, json.dumps(dict(bucket.storage_options))))
    assert printed.split("\n")[:2] == [str(len(AWKWARD) - 2 + 31), "['torch.cuda']"]


def test_a_key_that_obstore_cannot_name_is_listed_by_fsspec(bucket, caplog) -> None:
    open_transport(bucket).put("train//000", b"x")
    with caplog.at_level(logging.INFO, "airdata"):
        assert "train//000" in paths(read_listing(open_transport(bucket), Selection("train/**"), wait=0))
    assert "obstore could not list it, so fsspec does" in caplog.text
    assert str(bucket.storage_options["endpoint_url"]) not in caplog.text


@pytest.fixture
def silent() -> Iterator[Volume]:
    """A bucket on a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Volume.of(
            "s3://b/d",
            {"key": "k", "secret": "a-secret", "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}"},
        )


def children_that_list() -> list[psutil.Process]:
    def lists(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return "airdata.lister" in " ".join(child.cmdline())
        return False

    return list(filter(lists, psutil.Process().children()))


def test_credentials_reach_neither_the_command_line_nor_the_environment_of_the_child(silent) -> None:
    order = order_for(open_transport(silent), ("",))
    assert order is not None
    assert "a-secret" in order
    seen: list[bool] = []

    def look() -> None:
        deadline = time.monotonic() + 60
        while not (children := children_that_list()):
            assert time.monotonic() < deadline
        process = Path("/proc", str(children[0].pid))
        seen.extend(b"a-secret" in (process / file).read_bytes() for file in ("cmdline", "environ"))
        children[0].kill()

    looker = threading.Thread(target=look)
    looker.start()
    with pytest.raises(ListerError, match="exit status -9"):
        list(list_apart(order))
    looker.join()
    assert seen == [False, False]


def test_a_child_that_says_nothing_is_given_up(silent) -> None:
    with pytest.raises(ListerError, match="nothing for 2 s"):
        list(list_apart(order_for(open_transport(silent), ("",)) or "", stall=2))
    assert children_that_list() == []


@pytest.mark.parametrize("end", ["kill", "nonsense"])
def test_a_child_that_ends_early_has_listed_nothing(bucket, monkeypatch, end) -> None:
    program = {
        "kill": 'import os, signal; print(\'{"files": [["a"], [1], [""]]}\', flush=True); os.kill(os.getpid(), signal.SIGKILL)',
        "nonsense": "print('oh no', flush=True)",
    }
    monkeypatch.setattr(lister, "_PROGRAM", program[end])
    with pytest.raises(ListerError):
        list(list_apart(order_for(open_transport(bucket), ("",)) or ""))
    assert len(read_listing(open_transport(bucket), Selection("train/*"), wait=0)) == 30


def test_a_long_listing_says_how_far_it_is_also_while_its_driver_says_nothing(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(reading, "PROGRESS_SECONDS", 0.02)

    class Slow:
        volume = Volume.of(str(tmp_path))

        def list(self, prefix=""):
            yield FileInfo("a", 1)
            deadline = time.monotonic() + 60
            while "1 files listed in" not in caplog.text:
                assert time.monotonic() < deadline, "nothing was said"
                time.sleep(0.01)
            yield FileInfo("b", 1)

    with caplog.at_level(logging.INFO, "airdata"):
        assert paths(read_listing(Slow(), Selection(), wait=0)) == ["a", "b"]
    assert str(tmp_path) in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "airdata-listing" and not ended(thread)]


def ended(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def test_the_listing_child_has_ended_when_a_listing_fails_though_the_error_is_kept(bucket) -> None:
    def fussy(path: str) -> bool:
        raise ValueError(path)

    before = set(psutil.Process().children())
    with pytest.raises(ValueError) as kept:
        read_listing(open_transport(bucket), Selection(fussy), wait=0)
    assert kept.tb is not None  # as a notebook keeps the last one
    assert set(psutil.Process().children()) <= before  # one that has ended and was not waited for would be there
