"""Globs, predicates and hidden names."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.manifest.patterns import Selection, is_hidden


@pytest.mark.parametrize(
    ("pattern", "wanted", "unwanted"),
    [
        ("*.jpg", ["a.jpg"], ["d/a.jpg", "a.jpeg", "a.jpg/b"]),
        ("**/*.jpg", ["a.jpg", "d/a.jpg", "d/e/a.jpg"], ["a.png", "d/a.jpg.txt"]),
        ("train/**", ["train/a", "train/b/c"], ["test/a", "train"]),
        ("img?.p[ng]g", ["img1.png", "imgx.pgg"], ["img/.png", "img12.png"]),
        ("[!a]*", ["b1"], ["a1"]),
        (["*.a", "d/*.b"], ["x.a", "d/x.b"], ["x.b", "d/x.a"]),
        ("a+b(1).txt", ["a+b(1).txt"], ["aab1.txt"]),
        (lambda path: path.endswith("7"), ["x/7"], ["8"]),
        (None, ["anything/at all"], []),
    ],
)
def test_patterns_choose_files(pattern, wanted, unwanted) -> None:
    keeps = Selection(pattern).keeps()
    assert [path for path in wanted if not keeps(path)] == []
    assert [path for path in unwanted if keeps(path)] == []


@given(st.text("ab*?.", min_size=1, max_size=8).filter(lambda glob: "**" not in glob), st.text("ab.", max_size=8))
def test_globs_of_one_folder_are_those_of_the_standard_library(glob, name) -> None:
    assert Selection(glob).keeps()(name) == fnmatch.fnmatchcase(name, glob)


@pytest.mark.parametrize(
    ("pattern", "prefixes"),
    [
        (None, ("",)),
        ("**/*.jpg", ("",)),
        ("train/2024/**/*.jpg", ("train/2024",)),
        ("train/a.jpg", ("train",)),
        (["a/b/*", "a/*", "ab/*"], ("a", "ab")),
        (["x/*", "*"], ("",)),
    ],
)
def test_only_folders_that_can_match_are_listed(pattern, prefixes) -> None:
    assert Selection(pattern).prefixes == prefixes


def test_not_recursive_stays_in_the_folder_the_pattern_names() -> None:
    assert [p for p in ("a", "d/a", "d/e/a") if Selection(None, recursive=False).keeps()(p)] == ["a"]
    assert [p for p in ("a", "d/a", "d/e/a") if Selection("d/**", recursive=False).keeps()(p)] == ["d/a"]


@pytest.mark.parametrize(
    "path", ["_SUCCESS", "a/.DS_Store", ".git/config", "a/part-0.crc", "_committed_12", "t/_delta_log/0.json"]
)
def test_markers_are_hidden(path) -> None:
    assert is_hidden(path)


@pytest.mark.parametrize("path", ["a.jpg", "_images/a.jpg", "a/b.c/d", "x_SUCCESS"])
def test_data_is_not_hidden(path) -> None:
    assert not is_hidden(path)


@pytest.mark.parametrize("pattern", [[], [""], ["a", 3]])
def test_a_pattern_that_means_nothing_is_refused(pattern) -> None:
    with pytest.raises(ValueError, match="pattern="):
        Selection(pattern).keeps()
