"""The examples for clusters run as they are, but for the interpreter."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.fixture
def folder(tmp_path, cpu_only, monkeypatch):
    for path in EXAMPLES.iterdir():
        shutil.copy(path, tmp_path)
    # `python` and `torchrun` are those of this environment.
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wait_for(path, words, seconds=150):
    deadline = time.monotonic() + seconds
    while not path.exists() or words not in path.read_text():
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no output"
        time.sleep(0.1)
    return path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("slurm.sbatch", ["--processes", "2"]),
        ("srun-nodes.sbatch", ["--processes", "2"]),
        ("srun-ranks.sbatch", []),
    ],
)
def test_a_batch_script_of_slurm_trains_on_two_nodes(slurm, folder, script, arguments):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    subprocess.run(
        ["sbatch", "--partition=low", "--output=out", script, "--steps", "3", *arguments],
        env={**os.environ, **slurm.environ, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=60,
    )
    text = wait_for(folder / "out", "losses: [")
    assert len(json.loads(text.partition("losses: ")[2].splitlines()[0])) == 4
    assert "on node 1" in text or script != "srun-ranks.sbatch"


@pytest.mark.slow
def test_the_program_trains_under_torchrun(folder, free_ports):
    (port,) = free_ports(1)
    done = subprocess.run(
        ["bash", "torchrun.sh", "--steps", "3"],
        env={**os.environ, "PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert "rank 1 of 2 on node 0" in done.stdout, done.stdout + done.stderr
    assert "losses: [" in done.stdout


def test_the_jobset_gives_each_pod_what_a_node_needs():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    (manifest,) = yaml.safe_load_all((EXAMPLES / "jobset.yaml").read_text())
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    assert {"NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "AIRDIST_SECRET"} == set(variables)
    assert spec["parallelism"] == spec["completions"] == int(variables["NUM_NODES"]["value"])
    name = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    assert variables["MASTER_ADDR"]["value"] == name
