"""The MLflow run of a launch: one run, made and ended by the caller, in which the metrics of every rank land.

Ranks are real processes that do what the rank program does: `prepare_rank`, user code, `flush_rank`, `os._exit`.
"""

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from airdist.tracking.run import _bounded, start_run
from airdist.tracking.uri import absolute_uri, redact, run_page, split_credentials

PROLOGUE = """
import os, sys
from airdist.tracking.rank import flush_rank, prepare_rank
prepare_rank()
assert "mlflow" not in sys.modules
import mlflow
rank = int(os.environ.get("RANK", "0"))
"""
EPILOGUE = """
flush_rank()
os._exit(0)
"""


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A database with MLflow's tables, which take seconds to create; each test gets a copy."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path, monkeypatch, empty_database):
    """The client of a tracking store that is the process's default: `mlflow.db` in a directory of its own."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "AIRDIST_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    # Artifacts of the copied store would go to where the original was made.
    experiment = client.create_experiment("tests", artifact_location=(tmp_path / "artifacts").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    client.experiment_id = experiment
    return client


def launch(**tags):
    run = start_run(name="train", params={"num_accelerators": 2, "timeout": None}, tags=tags)
    assert run is not None
    return run


def rank_process(run, rank, code, **popen):
    environ = {
        **os.environ,
        **run.env(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }
    command = [sys.executable, "-c", PROLOGUE + code + EPILOGUE]
    return subprocess.Popen(command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **popen)


def run_rank(run, code, rank=0):
    process = rank_process(run, rank, code, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err
    return out, err


def points(client, run_id, key):
    return sorted(metric.value for metric in client.get_metric_history(run_id, key))


def test_a_launch_is_one_run_with_its_facts(store):
    run = launch(world_size="2", function="train", **{"mlflow.note.content": "hello"})
    (found,) = store.search_runs([store.experiment_id])
    assert found.info.run_id == run.run_id
    assert (found.info.run_name, found.info.status) == ("train", "RUNNING")
    assert found.data.params == {"num_accelerators": "2", "timeout": "None"}
    assert found.data.tags["airdist.world_size"] == "2"
    assert found.data.tags["airdist.host"] == socket.gethostname()
    assert found.data.tags["mlflow.note.content"] == "hello"
    assert "mlflow.user" in found.data.tags
    assert "mlflow.parentRunId" not in found.data.tags


def test_the_run_ends_as_the_launch_did_with_its_logs(store, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("epoch 1\n")
    run = launch()
    run.finish("FAILED", tags={"failed_rank": "1"}, logs=tmp_path / "logs")
    found = store.get_run(run.run_id)
    assert found.info.status == "FAILED"
    assert found.info.end_time >= found.info.start_time
    assert found.data.tags["airdist.failed_rank"] == "1"
    assert [artifact.path for artifact in store.list_artifacts(run.run_id, "logs")] == ["logs/rank_0.log"]
    run.finish("FINISHED")
    assert store.get_run(run.run_id).info.status == "FAILED"


def test_the_caller_is_left_as_it_was(store):
    before = dict(os.environ)
    run = launch()
    run.finish("FINISHED")
    assert dict(os.environ) == before
    assert mlflow.active_run() is None


def test_a_launch_inside_a_run_is_its_child_and_leaves_it_active(store):
    with mlflow.start_run() as outer:
        run = launch()
        assert mlflow.active_run().info.run_id == outer.info.run_id
        run.finish("FINISHED")
    child = store.get_run(run.run_id)
    assert child.data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert child.info.experiment_id == outer.info.experiment_id


def test_a_run_active_in_another_thread_is_no_parent(store):
    launched = []
    with mlflow.start_run():
        thread = threading.Thread(target=lambda: launched.append(launch()))
        thread.start()
        thread.join()
    assert "mlflow.parentRunId" not in store.get_run(launched[0].run_id).data.tags


def test_an_experiment_that_does_not_exist_is_created(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "/Users/me/new")
    run = launch()
    assert run.experiment_name == "/Users/me/new"
    assert store.get_experiment_by_name("/Users/me/new").experiment_id == run.experiment_id


def test_ranks_find_the_store_from_any_directory(store, tmp_path):
    env = launch().env()
    assert env["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"


def test_metrics_of_all_ranks_land_in_the_run_before_and_after_their_own_blocks(store):
    run = launch()
    code = """
mlflow.log_metric("before", rank)
with mlflow.start_run() as own:
    mlflow.log_metric("inside", rank)
    with mlflow.start_run(nested=True, run_name=f"inner{rank}"):
        mlflow.log_metric("inner", rank)
print("left", own.info.run_id, flush=True)
sys.stdin.readline()
mlflow.log_metric("after", rank)
"""
    # Given two ranks that have both left their own `with mlflow.start_run()`
    ranks = [rank_process(run, rank, code) for rank in (0, 1)]
    try:
        for rank in ranks:
            assert rank.stdout.readline().split() == ["left", run.run_id]
            # Then the launch's run is still open, although a rank has left it
            assert store.get_run(run.run_id).info.status == "RUNNING"
        for rank in ranks:
            rank.communicate("go\n", timeout=120)
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
    run.finish("FINISHED")
    assert store.get_run(run.run_id).info.status == "FINISHED"
    for key in ("before", "inside", "after"):
        assert points(store, run.run_id, key) == [0, 1], key
    # and there are no other runs than it and the two that the ranks nested in it, which have ended
    others = [found for found in store.search_runs([run.experiment_id]) if found.info.run_id != run.run_id]
    assert sorted((found.info.run_name, found.info.status) for found in others) == [
        ("inner0", "FINISHED"),
        ("inner1", "FINISHED"),
    ]
    assert {found.data.tags["mlflow.parentRunId"] for found in others} == {run.run_id}


def test_metrics_logged_by_a_thread_of_a_rank_land_in_the_run(store):
    run = launch()
    run_rank(
        run,
        """
import threading
mlflow.log_metric("main", 1)
threads = [threading.Thread(target=mlflow.log_metric, args=("thread", number)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
    )
    assert points(store, run.run_id, "thread") == [0, 1, 2]
    assert len(store.search_runs([run.experiment_id])) == 1


def test_a_run_that_a_rank_names_itself_is_its_own_and_the_launchs_comes_after_it(store):
    run = launch()
    own = store.create_run(store.experiment_id, run_name="own")
    run_rank(
        run,
        f"""
mlflow.log_metric("before", 1)
with mlflow.start_run(run_id="{own.info.run_id}"):
    mlflow.log_metric("own", 1)
with mlflow.start_run(experiment_id="0", run_name="by experiment"):
    mlflow.log_metric("own", 1)
mlflow.log_metric("after", 1)
""",
    )
    assert set(store.get_run(run.run_id).data.metrics) == {"before", "after"}
    assert set(store.get_run(own.info.run_id).data.metrics) == {"own"}
    (other,) = store.search_runs(["0"])
    assert (other.info.run_name, set(other.data.metrics)) == ("by experiment", {"own"})
    assert len(store.search_runs([store.experiment_id])) == 2


def test_an_exception_in_a_ranks_block_leaves_the_status_to_the_launcher(store):
    run = launch()
    run_rank(
        run,
        """
try:
    with mlflow.start_run():
        raise ValueError
except ValueError:
    pass
mlflow.MlflowClient().set_terminated(run_id=os.environ["MLFLOW_RUN_ID"], status="KILLED")
""",
    )
    assert store.get_run(run.run_id).info.status == "RUNNING"


def test_nothing_logged_in_the_background_is_lost_and_open_runs_are_ended(store):
    run = launch()
    run_rank(
        run,
        """
for step in range(200):
    mlflow.log_metric("loss", step, step=step, synchronous=False)
mlflow.start_run(nested=True, run_name="left open")
""",
    )
    assert points(store, run.run_id, "loss") == list(range(200))
    statuses = {found.info.run_name: found.info.status for found in store.search_runs([run.experiment_id])}
    assert statuses == {"train": "RUNNING", "left open": "FINISHED"}


def test_another_experiment_chosen_in_a_rank_is_obeyed_with_a_warning(store):
    run = launch()
    out, err = run_rank(
        run,
        """
mlflow.set_experiment("elsewhere")
with mlflow.start_run() as own:
    mlflow.log_metric("loss", 1)
print(own.info.run_id, own.info.experiment_id)
mlflow.set_experiment("tests")
""",
    )
    own, experiment = out.split()
    assert own != run.run_id
    assert experiment == store.get_experiment_by_name("elsewhere").experiment_id
    assert store.get_run(own).info.status == "FINISHED"
    assert store.get_run(run.run_id).info.status == "RUNNING"
    assert err.count("set_experiment('elsewhere') in a rank") == 1


def test_the_launchs_own_experiment_chosen_in_a_rank_changes_nothing(store):
    run = launch()
    out, _ = run_rank(run, "mlflow.set_experiment('tests')\nprint(mlflow.start_run().info.run_id)")
    assert out.split() == [run.run_id]


def test_only_the_first_rank_of_a_node_measures_the_node(store):
    run = launch()
    code = "print(os.environ['MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING'], os.environ['MLFLOW_SYSTEM_METRICS_NODE_ID'])"
    assert [run_rank(run, code, rank)[0].split() for rank in (0, 1)] == [["true", "node0"], ["false", "node0"]]


def test_a_rank_that_never_logs_leaves_no_store_behind(tmp_path):
    code = PROLOGUE + EPILOGUE
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AIRDIST_"))}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_the_module_that_was_hooked_looks_as_always():
    code = """
import os
os.environ["AIRDIST_MLFLOW_RUN_ID"] = "x"
from airdist.tracking.rank import prepare_rank
import sys
prepare_rank()
import inspect, mlflow.tracking.client as client
assert "class MlflowClient" in inspect.getsource(client)
assert type(client.__spec__.loader) is type(inspect.__spec__.loader), client.__spec__.loader
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("airdist")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


SILENT_SERVER = """
import logging, os, sys, time
logging.basicConfig(format="%(name)s %(message)s")
import mlflow
from airdist.tracking.run import start_run
before = dict(os.environ)
started = time.monotonic()
run = start_run(name="train", params={}, tags={})
print(run, time.monotonic() - started < 30, dict(os.environ) == before, flush=True)
os._exit(0)
"""


def test_a_server_that_never_answers_costs_a_bounded_time_and_one_warning(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        environ = {**os.environ, "MLFLOW_TRACKING_URI": uri, "AIRDIST_TRACKING_TIMEOUT": "1.5"}
        command = [sys.executable, "-c", SILENT_SERVER]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=120
        )
    assert done.stdout.split() == ["None", "True", "True"]
    assert done.stderr.count("airdist MLflow does not track this launch: TimeoutError: no answer in 1.5 s") == 1
    assert "secret" not in done.stdout + done.stderr


def test_a_store_that_refuses_is_a_warning(store, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://me:secret@host/db")
    assert start_run(name="train", params={}, tags={}) is None
    (record,) = [record for record in caplog.records if record.name == "airdist"]
    assert record.levelno == logging.WARNING
    assert "does not track this launch" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_without_mlflow_there_is_no_run():
    code = """
import sys
sys.modules["mlflow"] = None
from airdist.tracking.run import start_run
print(start_run(name="train", params={}, tags={}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "None"
    assert "MLflow does not track this launch: ModuleNotFoundError" in done.stderr


def test_importing_the_module_imports_no_mlflow():
    code = "import sys, airdist.tracking.run; print([name for name in ('mlflow', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_finish_warns_and_does_not_raise(store, tmp_path, caplog):
    # Given an artifact store that cannot be written to, even by root
    (tmp_path / "artifacts").write_text("a file where the directory should be")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("epoch 1")
    run = launch()
    run.finish("FINISHED", tags={"failed_rank": "none"}, logs=tmp_path / "logs")
    assert store.get_run(run.run_id).info.status == "FINISHED"
    assert f"they stay in {tmp_path}/logs" in caplog.text


def test_a_result_that_comes_too_late_is_handed_to_its_undoing():
    go, undone = threading.Event(), threading.Event()
    results = []

    def work():
        assert go.wait(60)
        return "run"

    def late(result):
        results.append(result)
        undone.set()

    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        _bounded(work, 0.05, late)
    go.set()
    assert undone.wait(60)
    assert results == ["run"]


def test_an_error_of_the_work_is_the_callers():
    def work():
        raise KeyError("x")

    with pytest.raises(KeyError):
        _bounded(work, 60)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sqlite:///mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("mlruns", "file:///home/me/mlruns"),
        ("./my runs", "file:///home/me/my%20runs"),
        ("", "file:///home/me/mlruns"),
        ("/data/mlruns", "file:///data/mlruns"),
        ("file:mlruns", "file:///home/me/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("http://host:5000", "http://host:5000"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
        ("postgresql://me:secret@host/db", "postgresql://me:secret@host/db"),
    ],
)
def test_tracking_uris_are_made_absolute(uri, expected):
    assert absolute_uri(uri, Path("/home/me")) == expected


def test_passwords_are_kept_out_of_what_people_read():
    uri = "https://me:p%40ss@host:5000/path/"
    assert split_credentials(uri) == ("https://host:5000/path/", "me", "p@ss")
    assert run_page(uri, "7", "abc") == "https://host:5000/path/#/experiments/7/runs/abc"
    assert redact(f"cannot reach {uri}, nor postgresql://a:b@db/x") == (
        "cannot reach https://***@host:5000/path/, nor postgresql://***@db/x"
    )


def test_databricks_runs_have_a_page_in_their_workspace():
    assert run_page("databricks", "7", "abc", "https://w.cloud/") == "https://w.cloud/ml/experiments/7/runs/abc"
    assert run_page("sqlite:////x.db", "7", "abc", "https://w.cloud/") is None


@pytest.mark.slow
def test_a_tracking_server_works_the_same_and_its_page_opens(tmp_path, monkeypatch, free_ports):
    import time
    import urllib.request

    (port,) = free_ports(1)
    database = f"sqlite:///{tmp_path}/mlflow.db"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        database,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    server = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{port}")
        monkeypatch.setenv("AIRDIST_TRACKING_TIMEOUT", "60")
        run = launch()
        assert run.url == f"http://127.0.0.1:{port}/#/experiments/0/runs/{run.run_id}"
        out, err = run_rank(run, "mlflow.log_metric('loss', 1)\nwith mlflow.start_run(nested=True): pass")
        run.finish("FINISHED", logs=tmp_path)
        assert "secret" not in out + err + repr(run) + run.link
        assert MlflowClient().get_run(run.run_id).info.status == "FINISHED"
    finally:
        os.killpg(server.pid, 15)
        server.wait(60)
