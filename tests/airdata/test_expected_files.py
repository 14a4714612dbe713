"""expected_files=: a dataset that is built while its files are still being written."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest

from airdata import MissingFilesError, UCVolumeDataset, arrival
from airdata.errors import EmptyListingError
from airdata.manifest import reading as listing


def write_after(condition, files: list[Path]) -> threading.Thread:
    """Write files, one after the other, each as soon as ``condition(its number)`` holds."""

    def write() -> None:
        for number, file in enumerate(files):
            deadline = time.monotonic() + 120
            while not condition(number) and time.monotonic() < deadline:
                time.sleep(0.005)
            part = file.with_name(f".{file.name}")
            part.write_bytes(b"x")
            part.rename(file)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def visible(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "files are visible" in record.getMessage()]


def test_files_that_are_still_being_written_are_waited_for_and_progress_is_logged(tmp_path, caplog) -> None:
    files = [tmp_path / f"file{number}.bin" for number in range(4)]
    files[0].write_bytes(b"x")
    with caplog.at_level(logging.INFO, "airdata"):
        # Each comes only when the dataset has said that it is missing.
        writer = write_after(lambda number: len(visible(caplog)) > number, files[1:])
        dataset = UCVolumeDataset(str(tmp_path), expected_files=4)
        assert [os.path.basename(path) for path in dataset] == [file.name for file in files]
        writer.join()
    assert f"{tmp_path}: 1 of 4 files are visible" in visible(caplog)[0]
    assert "3 of 4 files" in visible(caplog)[-1]


def test_a_volume_that_is_empty_at_first_is_waited_for(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(listing, "EMPTY_WAIT", 0.0)
    with caplog.at_level(logging.INFO, "airdata"):
        writer = write_after(lambda _: bool(visible(caplog)), [tmp_path / "late.bin"])
        assert len(UCVolumeDataset(str(tmp_path), expected_files=1)) == 1
        writer.join()
    with pytest.raises(EmptyListingError):
        len(UCVolumeDataset(str(tmp_path), pattern="*.jpg"))


def test_files_that_do_not_come_are_an_error_that_says_how_many_there_are(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arrival, "PATIENCE", 0.2)
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(MissingFilesError, match=r"1 files are visible, expected_files=3.*path and pattern"):
        len(UCVolumeDataset(str(tmp_path), expected_files=3))


def test_files_of_several_paths_count_together(tmp_path, make_files, monkeypatch) -> None:
    for name, count in (("a", 3), ("b", 2)):
        make_files(tmp_path / name, count)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert len(UCVolumeDataset(paths, expected_files=5)) == 5
    assert len(UCVolumeDataset(paths, expected_files=4)) == 5  # more than expected is well
    monkeypatch.setattr(arrival, "PATIENCE", 0.0)
    with pytest.raises(MissingFilesError, match="5 files are visible"):
        len(UCVolumeDataset(paths, expected_files=6))


def test_a_manifest_with_too_few_files_is_refused_at_once(volume) -> None:
    directory = volume(4)
    manifest = UCVolumeDataset(directory).manifest
    assert len(UCVolumeDataset(directory, manifest=manifest, expected_files=4)) == 4
    with pytest.raises(MissingFilesError, match="holds 4 files, and expected_files=5"):
        UCVolumeDataset(directory, manifest=manifest, expected_files=5)


def test_ranks_of_a_node_wait_for_the_same_files(tmp_path, program, finish, monkeypatch) -> None:
    code = """
        import logging, sys
        from airdata import UCVolumeDataset
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        print("read", len(UCVolumeDataset(sys.argv[1], expected_files=2).manifest), flush=True)
    """
    directory = tmp_path / "volume"
    directory.mkdir()
    (directory / "one").write_bytes(b"x")
    launch = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    ranks = [program(code, directory, RANK=rank, LOCAL_RANK=rank, **launch) for rank in range(2)]
    for rank in ranks:  # both have seen too few
        while "1 of 2 files are visible" not in (line := rank.stdout.readline()):
            assert line, rank.communicate()
    (directory / "two").write_bytes(b"x")
    assert all("read 2" in finish(rank) for rank in ranks)
