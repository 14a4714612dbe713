"""The main job, as a user runs it: a script, a notebook, and a bucket in place of a directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(400)


def run_script(tmp_path: Path, *arguments: str, **environ: str) -> str:
    environ = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db", **environ}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py"), "--out", str(tmp_path / "out"), *arguments],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def check(output: str) -> None:
    assert re.search(r"resumed at step [1-9]\d* of", output), output
    assert "training files exactly once in each of 5 epochs, across the kill" in output
    twice, same = map(int, re.search(r"(\d+) batches were computed twice: same samples, (\d+)", output).groups())
    assert twice == same


def test_the_script_is_killed_resumes_exactly_and_learns(tmp_path):
    output = run_script(tmp_path, "--epochs", "5")
    check(output)
    assert "SIGKILL" in output
    (plot,) = tmp_path.glob("out/digits-*/digits.png")
    assert plot.stat().st_size > 10_000
    (stored,) = tmp_path.glob("out/volumes/main/demo/digits-checkpoints/digits-*")
    assert len(list(stored.glob("*/.metadata"))) in range(1, 4), "three checkpoints are kept"
    # One run for the job and one for each attempt, with the ends they really had.
    from mlflow import MlflowClient

    runs = MlflowClient(f"sqlite:///{tmp_path}/runs.db").search_runs(["0"], order_by=["attributes.start_time ASC"])
    assert [run.info.status for run in runs] == ["FINISHED", "FAILED", "FINISHED"]
    assert runs[2].data.metrics["accuracy"] > 0.95


def test_the_script_runs_on_a_bucket(tmp_path, s3_volume, s3_endpoint):
    output = run_script(
        tmp_path,
        "--epochs=5",
        f"--volume={s3_volume.url}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_ENDPOINT_URL=s3_endpoint,
        AWS_DEFAULT_REGION="us-east-1",
    )
    check(output)


def test_the_notebook_is_the_script():
    subprocess.run([sys.executable, str(EXAMPLES / "make_notebook.py"), "--check"], check=True)


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    shutil.copy(EXAMPLES / "digits.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "digits.ipynb", 4)
    job = next(cell for cell in notebook.cells if cell.source.startswith("run_job"))
    job.source = job.source.replace(")", ", epochs=5)")
    NotebookClient(notebook, timeout=350, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check("".join(output.get("text", "") for output in job.outputs))
    assert "image/png" in notebook.cells[-1].outputs[0].data
