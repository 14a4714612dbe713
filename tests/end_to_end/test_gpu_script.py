"""The script that measures on GPUs runs without any: two gloo ranks and small sizes. Its numbers mean nothing here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"

pytestmark = pytest.mark.timeout(400)


def run(tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, list[dict]]]:
    """Status, output, and the results by section."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]
    # A session of its own, so that whatever the time-out leaves can be ended.
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=350)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = json.loads((tmp_path / "out" / "results.json").read_text())["sections"]
    return process.returncode, output, found


def held(result: dict, words: str) -> bool:
    """Whether the one check with these words holds."""
    (ok,) = [ok for text, ok in result["checks"] if words in text]
    return ok


def test_a_sharded_state_is_measured_and_its_bits_are_checked(tmp_path):
    status, output, found = run(tmp_path, "--only", "stall", "--ranks", "2", "--seconds", "300")
    assert status == 0, output
    stall, totals, stock = found["stall"]
    assert "2 ranks" in stall["title"]
    assert held(stall, "restore gives back every bit")
    assert held(totals, "every load gives back every bit")
    assert [row[0] for row in stock["rows"]].count("async_save, pinned stager") == 2, stock["rows"]
    assert all(isinstance(row[2], float) for row in stock["rows"] if row[2] != "no time left"), stock["rows"]
    assert stall["title"] in output, "tables are shown as they come"
    assert stall["title"] in (tmp_path / "out" / "tables.md").read_text()
    assert not list(tmp_path.glob("airdata-gpu-*")), "the work directory is removed"


def test_a_section_that_fails_is_shown_with_its_words_and_the_next_one_runs(tmp_path, monkeypatch):
    # Nothing can be launched, and resharding on one rank needs no launch.
    monkeypatch.setenv("AIRDIST_ENGINE", "abacus")
    status, output, found = run(tmp_path, "--only", "training,reshard", "--ranks", "1", "--seconds", "300")
    assert status == 1, output
    failed = found["training"][-1]
    assert "did not end well" in failed["title"]
    assert "abacus" in failed["rows"][0][0]
    assert "abacus" in (tmp_path / "out" / "training.log").read_text()
    assert "needs more than one rank" in found["reshard"][0]["rows"][0][0]


def test_a_section_that_runs_again_leaves_what_was_found_in_the_others(tmp_path):
    for section in ("reshard", "metrics"):
        status, output, found = run(tmp_path, "--only", section, "--ranks", "1", "--seconds", "300")
        assert status == 0, output
    assert list(found) == ["reshard", "metrics"]
    assert found["reshard"][0]["title"] in (tmp_path / "out" / "tables.md").read_text()
