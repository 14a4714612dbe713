"""The benchmarks of the data path run, and what they count exactly comes out as the design wants it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def results(name: str, out: Path) -> list[dict]:
    """Run a benchmark with little data; what it saved, one table after the other."""
    command = [sys.executable, str(RUN), name, "--quick", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = sorted(out.glob("*.json"))
    assert [table.with_suffix(".png").stat().st_size > 0 for table in tables] == [True] * len(tables)
    return [json.loads(table.read_text()) for table in tables]


def test_a_node_reads_its_source_once_and_a_small_cache_keeps_its_share(tmp_path) -> None:
    node, small = (table["of the dataset"] for table in results("data/source_bytes", tmp_path))
    assert node == {"first epoch": [1.0], "second epoch": [0.0]}
    [hits], [read] = small["hits, cache of half"], small["read, cache of half"]
    assert hits >= 0.48
    assert read == pytest.approx(1 - hits)


@pytest.mark.slow
def test_a_cold_epoch_is_measured_beside_its_ceiling_and_its_peers(tmp_path) -> None:
    pytest.importorskip("psutil")
    [table] = results("data/cold", tmp_path)
    assert {"airdata", "bare loop", "torch over s3fs"} <= table["ms per file"].keys()
    missing = [note for note in table["notes"] if "left out" in note]
    assert len(table["ms per file"]) + len(missing) == 6
    assert os.listdir(tmp_path)
