"""Names of cache entries: the tail survives, nothing leaves the root, versions are apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.cache.names import DIGEST, EntryName, entry_name, generation_name, lock_bytes, safe_tail
from airdata.cache.root import Layout
from airdata.transport import FileInfo

# Anything an object store may hold as a key, and some of what it may not.
keys = st.text(st.characters(codec=None), min_size=0, max_size=300) | st.lists(
    st.sampled_from(
        ["..", ".", "", "a", "é", "e\u0301", "NUL\0", "x" * 300 + ".jpg", "y.tar.gz", "\ud800", "\udc80", "~"]
    ),
    min_size=1,
    max_size=40,
).map("/".join)


@given(path=keys)
def test_no_name_leaves_its_folder(path: str) -> None:
    tail = safe_tail(path)
    assert not os.path.isabs(tail)
    assert os.path.normpath(f"/root/{tail}") == f"/root/{tail}"
    parts = tail.split("/")
    assert all(part not in {"", ".", ".."} and "\0" not in part for part in parts)
    assert all(0 < len(os.fsencode(part)) <= 255 for part in parts)
    assert len(os.fsencode(tail)) <= 2100


@given(
    parts=st.lists(
        st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=60), min_size=1, max_size=6
    )
)
def test_a_name_that_a_disk_can_hold_is_kept(parts: list[str]) -> None:
    parts = [part.replace(".", "dot") if part in {".", ".."} else part for part in parts]
    path = "/".join(parts)
    assert safe_tail(path) == path


@given(path=keys)
def test_only_the_component_that_offends_is_replaced(path: str) -> None:
    good = "train/cat/" + path + "/x.jpg"
    tail = safe_tail(good)
    assert tail.endswith("/x.jpg")
    if len(os.fsencode(tail)) < 1000:
        assert tail.startswith("train/cat/")


@pytest.mark.parametrize(
    ("path", "suffix"),
    [
        ("a/" + "n" * 400 + ".jpeg", ".jpeg"),
        ("a/" + "é" * 200 + ".PNG", ".PNG"),
        ("a/b\0c.npy", ".npy"),
        ("\ud800.txt", ".txt"),
    ],
)
def test_a_replaced_name_keeps_its_suffix(path: str, suffix: str) -> None:
    assert os.path.splitext(safe_tail(path))[1] == suffix


def test_different_long_names_stay_different() -> None:
    assert safe_tail("x" * 400 + "1.jpg") != safe_tail("x" * 400 + "2.jpg")


@given(path=keys)
def test_every_name_can_be_made_on_this_disk(path: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("root")
    file = root / safe_tail(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    assert root in Path(os.path.realpath(file)).parents


@given(longest=st.integers(60, 254), path=keys)
def test_a_disk_with_a_shorter_limit_is_respected(longest: int, path: str) -> None:
    assert all(len(os.fsencode(part)) <= longest for part in safe_tail(path, longest).split("/"))


def test_size_version_path_and_source_each_make_another_entry() -> None:
    one, other = generation_name("s3://a"), generation_name("s3://b")
    names = {
        entry_name(one, FileInfo("a/b", 1, "etag:1")).digest,
        entry_name(one, FileInfo("a/b", 2, "etag:1")).digest,
        entry_name(one, FileInfo("a/b", 1, "etag:2")).digest,
        entry_name(one, FileInfo("a/B", 1, "etag:1")).digest,
        entry_name(other, FileInfo("a/b", 1, "etag:1")).digest,
        entry_name(one, FileInfo("a/b1", 1, ":etag:1")).digest,
        entry_name(one, FileInfo("a/b", 11, "etag:1")).digest,
    }
    assert len(names) == 7
    assert all(DIGEST.fullmatch(name) for name in names)


def test_keys_that_differ_only_in_case_or_normal_form_have_stamps_and_folders_of_their_own() -> None:
    layout = Layout("/root")
    generation = generation_name("s3://a")
    paths = ["A/x.jpg", "a/x.jpg", "\u00e9.jpg", "e\u0301.jpg", "a", "a/x.jpg/b"]
    names = [entry_name(generation, FileInfo(path, 1)) for path in paths]
    assert len({layout.other(name).split("/")[5].lower() for name in names}) == len(paths)
    assert len({name.stamp(10**18) for name in names}) == len(paths)


@given(
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
    now=st.integers(10**18, 4 * 10**18),
    off=st.integers(-(10**13), 10**13),
)
def test_a_stamp_is_a_time_of_the_last_day_that_no_other_time_near_it_is(digest: str, now: int, off: int) -> None:
    name = EntryName("", digest, "x")
    stamp = name.stamp(now)
    assert now - 86400 * 10**9 < stamp <= now
    assert name.stamped(stamp)
    assert name.stamped(stamp + off) is (off == 0)


@given(digest=st.text("0123456789abcdef", min_size=32, max_size=32))
def test_the_bytes_of_a_lock_are_within_a_file_offset_and_apart_from_the_fixed_ones(digest: str) -> None:
    flight, lease = lock_bytes(digest)
    assert 1024 <= flight < lease < sys.maxsize
