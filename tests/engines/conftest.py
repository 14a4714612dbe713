"""Every engine, real, as a place where a launch can be made; adding one is one fixture and its name in `ENGINES`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ray_cluster
import slurm_cluster
import spark_cluster

from airdist import distributed

ENGINES = ["local", "slurm", "ray", "spark"]


@dataclass(frozen=True)
class Place:
    """Where a launch is made.

    Attributes:
        settings: arguments of `distributed`; there are four ranks in all.
        nodes: how many nodes there are.
        environ: variables that a program of its own needs to launch there.
        prelude: what such a program has to run first.
    """

    settings: dict[str, Any]
    nodes: int
    environ: dict[str, str] = field(default_factory=dict)
    prelude: str = ""

    def launchable(self, function, **settings):
        return distributed(**{"timeout": 120, "tracking": False, "logs": "all"} | self.settings | settings)(function)


@pytest.fixture(params=ENGINES)
def place(request, cpu_only) -> Place:
    return request.getfixturevalue(f"{request.param}_place")


@pytest.fixture
def cpu_only(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # A search path of its own, so that programs of their own find the engines of these tests.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def local_place() -> Place:
    return Place({"num_accelerators": 4}, nodes=1)


@pytest.fixture
def host_place(cpu_only) -> Place:
    return Place({"engine": "host_engine:HostEngine", "nodes": 2, "num_accelerators": 2}, nodes=2)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory, free_ports) -> Iterator[slurm_cluster.SlurmCluster]:
    if lacking := slurm_cluster.missing():
        pytest.skip(lacking)
    cluster = slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"), free_ports(3))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm_place(slurm, monkeypatch, cpu_only) -> Iterator[Place]:
    """Inside an allocation of two nodes: agents are tasks of `srun`."""
    granted = subprocess.run(
        ["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1", "--partition=low"],
        env={**os.environ, **slurm.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    job_id = next(word for word in granted.stderr.split() if word.isdigit())
    environ = {**slurm.environ, "SLURM_JOB_ID": job_id, "SLURM_JOB_NUM_NODES": "2"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    yield Place({"engine": "slurm", "nodes": 2, "num_accelerators": 2}, nodes=2, environ=environ)
    slurm.ask("scancel", job_id)


@pytest.fixture
def slurm_queue(slurm, monkeypatch, cpu_only) -> Place:
    """Outside of any allocation: agents are tasks of a job that submitit submits."""
    monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    options = {"partition": "low", "time": "0:30:00"}
    return Place(
        {"engine": "slurm", "nodes": 2, "num_accelerators": 2, "engine_options": options}, 2, dict(slurm.environ)
    )


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory) -> Iterator[ray_cluster.RayCluster]:
    if lacking := ray_cluster.missing():
        pytest.skip(lacking)
    cluster = ray_cluster.RayCluster(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.stop()


@pytest.fixture
def ray_place(ray_nodes, monkeypatch, cpu_only) -> Iterator[Place]:
    """Outside of the cluster, with its address in the environment; afterwards nothing is left in it."""
    for name, value in ray_nodes.environ.items():
        monkeypatch.setenv(name, value)
    yield Place({"engine": "ray", "nodes": 2, "num_accelerators": 2}, nodes=2, environ=dict(ray_nodes.environ))
    ray_nodes.wait_until_free()


@pytest.fixture(scope="session")
def spark(tmp_path_factory) -> Iterator[spark_cluster.SparkCluster]:
    if lacking := spark_cluster.missing():
        pytest.skip(lacking)
    cluster = spark_cluster.SparkCluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def spark_place(spark, cpu_only, tmp_path) -> Iterator[Place]:
    """On the session of this process; a program of its own makes one. Afterwards no task is left in the cluster."""
    prelude = f"import spark_cluster; spark_cluster.start({str(tmp_path)!r})"
    yield Place({"engine": "spark", "nodes": 2, "num_accelerators": 2}, nodes=2, prelude=prelude)
    deadline = time.monotonic() + 60
    while tasks := spark.active_tasks():
        assert time.monotonic() < deadline, f"{tasks} tasks are left"
        time.sleep(0.1)


@dataclass(frozen=True)
class Pids:
    """Processes that have told their pid by appending a line to a file: `pids.write(kind)` in a rank."""

    path: str

    def write(self, kind: str, pid: int | None = None) -> None:
        with open(self.path, "a") as file:
            file.write(f"{kind} {pid or os.getpid()}\n")

    def read(self, kind: str = "") -> list[int]:
        lines = Path(self.path).read_text().splitlines() if os.path.exists(self.path) else []
        return [int(line.split()[1]) for line in lines if line.startswith(kind)]

    def wait_for(self, kind: str, count: int, seconds: float = 60) -> list[int]:
        deadline = time.monotonic() + seconds
        while len(found := self.read(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} {kind} after {seconds} s"
            time.sleep(0.02)
        return found

    def wait_for_end(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while left := [pid for pid in self.read() if alive(pid)]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def pids(tmp_path) -> Iterator[Pids]:
    pids = Pids(str(tmp_path / "pids"))
    yield pids
    for pid in pids.read():
        if alive(pid):
            os.kill(pid, 9)
