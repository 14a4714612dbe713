"""Processes that somebody else has started: as nodes or as ranks they take part, and all get the same list."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from airdist import LaunchError, distributed
from airdist.attach import NodeWorld, RankWorld, node_world, outer_world
from airdist.settings import Settings

NODE_0 = {"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login",
}

PROGRAM = """
import json, os, sys
from airdist import distributed, runtime

@distributed({arguments})
def train(offset):
    if {fails!r} and runtime.get_global_rank() == 3:
        raise KeyError("the last one")
    return offset + runtime.get_global_rank(), runtime.get_node_rank(), runtime.get_local_rank()

results = []
for offset in (0, 10):
    try:
        results.append(train.distributed(offset))
    except KeyError as error:
        results.append(repr(error))
print("RESULTS", json.dumps(results))
"""


def program(tmp_path, arguments, *, fails=False):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM.format(arguments=arguments, fails=fails)))
    return [sys.executable, str(script)]


def results_of(text):
    return [json.loads(line.partition("RESULTS ")[2]) for line in text.splitlines() if "RESULTS " in line]


def every(offset):
    return [[offset + rank, rank // 2, rank % 2] for rank in range(4)]


@pytest.fixture
def nodes(tmp_path, cpu_only, free_ports):
    """Run a program once for each of two nodes, as a JobSet would, and return what each printed."""

    def run(command, **environ):
        (port,) = free_ports(1)
        given = {**NODE_0, "MASTER_PORT": str(port), "AIRDIST_SECRET": "5" * 64, **environ}
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **given, "NODE_RANK": str(node)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
            )
            for node in (1, 0)
        ]
        return [process.communicate(timeout=120)[0] for process in processes]

    return run


def test_nodes_that_have_been_started_are_one_world_for_one_call_after_another(nodes, tmp_path):
    other, first = nodes(program(tmp_path, "num_accelerators=2, tracking=False"))
    assert results_of(first) == results_of(other) == [[every(0), every(10)]], first + other


def test_an_exception_is_raised_on_every_node(nodes, tmp_path):
    said = nodes(program(tmp_path, "num_accelerators=2, tracking=False", fails=True))
    assert [results_of(text) for text in said] == [[["KeyError('the last one')"] * 2]] * 2, said


def test_nodes_without_a_secret_say_how_to_make_one(nodes, tmp_path):
    said = nodes(program(tmp_path, "num_accelerators=1, tracking=False"), AIRDIST_SECRET="")
    assert all("openssl rand -hex 32" in text for text in said), said


@pytest.mark.slow
def test_one_launch_of_all_nodes_is_one_run_of_mlflow(nodes, tmp_path):
    import mlflow

    uri = f"sqlite:///{tmp_path}/runs.db"
    mlflow.MlflowClient(tracking_uri=uri).search_experiments()
    other, first = nodes(program(tmp_path, "num_accelerators=2"), MLFLOW_TRACKING_URI=uri)
    assert results_of(first) == results_of(other), first + other
    runs = mlflow.MlflowClient(tracking_uri=uri).search_runs(["0"])
    assert [(run.info.status, run.data.tags["airdist.world_size"]) for run in runs] == [("FINISHED", "4")] * 2


def test_ranks_of_torchrun_are_one_run_of_mlflow(cpu_only, tmp_path):
    import mlflow

    uri = f"sqlite:///{tmp_path}/runs.db"
    mlflow.MlflowClient(tracking_uri=uri).search_experiments()
    script = tmp_path / "logs.py"
    script.write_text(
        textwrap.dedent("""
        import os, mlflow
        from airdist import distributed

        @distributed
        def train(name):
            mlflow.log_metric(f"{name}_{os.environ['RANK']}", 1.0)
            with mlflow.start_run():
                mlflow.log_metric(f"again_{os.environ['RANK']}", 1.0)

        train.distributed("first")
        train.with_overrides(name="second").distributed("second")
        assert mlflow.active_run() is None and "MLFLOW_RUN_ID" not in os.environ
        if os.environ["RANK"] == "1":
            mlflow.start_run(run_name="outside")
            mlflow.end_run()
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = {run.info.run_name: run for run in mlflow.MlflowClient(tracking_uri=uri).search_runs(["0"])}
    assert set(runs) == {"train", "second", "outside"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert set(runs["train"].data.metrics) >= {"first_0", "first_1", "again_0", "again_1"}
    assert set(runs["second"].data.metrics) >= {"second_0", "second_1", "again_0", "again_1"}
    assert runs["train"].data.tags["airdist.world_size"] == "2"


@pytest.mark.parametrize("shape", [["--ntasks-per-node=1"], ["--ntasks-per-node=2"]], ids=["nodes", "ranks"])
def test_tasks_of_srun_are_nodes_or_ranks_of_one_world(slurm, cpu_only, tmp_path, shape):
    arguments = "tracking=False" + (", num_accelerators=2" if "1" in shape[0] else "")
    command = program(tmp_path, arguments)
    if "2" in shape[0]:
        text = Path(command[1]).read_text()
        group = "    import torch.distributed as dist\n    dist.is_initialized() or dist.init_process_group('gloo')\n"
        Path(command[1]).write_text(text.replace("def train(offset):\n", f"def train(offset):\n{group}"))
    done = subprocess.run(
        ["srun", "--nodes=2", *shape, "--partition=low", *command],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            **slurm.environ,
            "AIRDIST_SECRET": "5" * 64,
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    count = 2 if "1" in shape[0] else 4
    assert results_of(done.stdout) == [[every(0), every(10)]] * count, done.stdout + done.stderr


def test_a_task_among_several_on_a_node_is_a_rank():
    world = outer_world(STEP, Settings())
    assert isinstance(world, RankWorld)
    assert (world.rank, world.world_size) == (3, 4)
    assert {
        name: world.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
    } == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
    }
    assert world.environ["MASTER_ADDR"] == "gpu07"
    assert 15000 <= int(world.environ["MASTER_PORT"]) < 30000


@pytest.mark.parametrize(("listed", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("a-b[3,5]", "a-b3"), ("x[1-2]-y", "x1")])
def test_the_first_host_of_a_step_is_node_0(listed, first):
    world = outer_world(
        {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": listed, "SLURM_PROCID": "1"}, Settings()
    )
    assert isinstance(world, NodeWorld)
    assert (world.node, world.nodes, world.address) == (1, 2, first)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NUM_NODES": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"},  # an interactive shell
    ],
)
def test_one_process_in_an_allocation_is_free_to_launch(environ):
    assert outer_world(environ, Settings()) is None


def test_an_engine_that_is_named_comes_before_what_an_allocation_suggests(monkeypatch):
    assert outer_world(STEP, Settings(engine="slurm")) is None
    assert outer_world({**STEP, "AIRDIST_ENGINE": "local"}, Settings()) is None
    assert isinstance(outer_world({"RANK": "0", "WORLD_SIZE": "2"}, Settings(engine="slurm")), RankWorld)


def test_incomplete_or_contradicting_descriptions_of_nodes_are_errors():
    with pytest.raises(LaunchError, match="NUM_NODES=2 is set without NODE_RANK and MASTER_ADDR"):
        node_world({"NUM_NODES": "2"})
    with pytest.raises(LaunchError, match="'two'"):
        node_world({**NODE_0, "NUM_NODES": "two"})
    with pytest.raises(LaunchError, match="nodes=3, but this process is one of 2"):
        outer_world(NODE_0, Settings(nodes=3))


def test_a_launch_in_the_background_is_refused_where_processes_exist_already(monkeypatch):
    for name, value in NODE_0.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"use \.distributed\(\) to take part"):
        distributed(abs).submit(1)


def test_an_interrupt_on_another_node_lets_ranks_everywhere_clean_up(cpu_only, tmp_path, pids, free_ports):
    script = tmp_path / "interrupted.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, time
        from pathlib import Path
        from airdist import distributed

        def clean_up(*_):
            Path({str(tmp_path)!r}, "clean-" + os.environ["RANK"]).touch()
            os._exit(0)

        @distributed(num_accelerators=1, tracking=False)
        def train():
            signal.signal(signal.SIGTERM, clean_up)
            with open({pids.path!r}, "a") as file:
                file.write(f"rank {{os.getpid()}}\\n")
            time.sleep(600)

        train.distributed()
        """)
    )
    (port,) = free_ports(1)
    given = {**os.environ, **NODE_0, "MASTER_PORT": str(port), "AIRDIST_SECRET": "5" * 64}
    first, other = (
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**given, "NODE_RANK": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        for node in "01"
    )
    try:
        pids.wait_for("rank", 2)
        other.send_signal(signal.SIGINT)
        said = [process.communicate(timeout=90)[0] for process in (other, first)]
        assert "KeyboardInterrupt" in said[0]
        pids.wait_for_end()
        assert {path.name for path in tmp_path.glob("clean-*")} == {"clean-0", "clean-1"}
    finally:
        for process in (first, other):
            process.kill()
            process.wait()


def test_a_job_of_slurm_is_cancelled_although_the_controller_does_not_say_how_it_is(slurm, monkeypatch, tmp_path):
    from airdist.engines.slurm import _Job

    job = object.__new__(_Job)  # as the process that has submitted it knows it
    job._id = slurm.ask("sbatch", "--parsable", "--hold", "--partition=low", "--output=none", "--wrap=true").strip()
    silent = tmp_path / "bin"
    silent.mkdir()
    (silent / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (silent / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{silent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
    assert slurm.ask("squeue", "--noheader", "--format=%i", f"--jobs={job._id}").strip() == job._id
    job.close(0)
    assert not slurm.ask("squeue", "--noheader", "--format=%i", f"--jobs={job._id}").strip()
