"""Counters add up; the reporter never gets in the way."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from airdata.metrics import Counters, Reporter


def test_counters_add_and_subtract() -> None:
    total = Counters(files=3, hits=2, misses=1, bytes_fetched=100, wait_seconds=0.5)
    before = total.copy()
    total.add(Counters(files=1, misses=1, bytes_fetched=50, retries=2, bad_files=1, wait_seconds=0.25))
    assert total == Counters(4, 150, 2, 2, 2, 1, 0.75)
    assert total.minus(before) == Counters(1, 50, 0, 1, 2, 1, 0.25)
    assert total.as_dict()["bytes_fetched"] == 150


def test_counters_read_well() -> None:
    text = repr(Counters(files=4, hits=3, misses=1, bytes_fetched=3 << 20, wait_seconds=1.5))
    assert text == "Counters(4 files (75% hits), 3.0 MiB fetched, 1 misses, 0 retries, 0 bad, 1.50 s waited)"
    assert "hits" not in repr(Counters())


def test_points_reach_the_active_run_as_means() -> None:
    import mlflow

    with mlflow.start_run() as run:
        reporter = Reporter(interval=60)
        for value in (1.0, 2.0, 6.0):
            reporter.put("fetch_seconds", value)
        reporter.close(60)
    [point] = mlflow.MlflowClient().get_metric_history(run.info.run_id, "fetch_seconds")
    assert (point.value, point.step) == (3.0, 3)


def test_many_values_become_few_points() -> None:
    import mlflow

    with mlflow.start_run() as run:
        reporter = Reporter(interval=0.5)
        start = time.monotonic()
        while time.monotonic() - start < 1.2:
            reporter.put("fetch_seconds", 1.0)
            time.sleep(0.001)
        reporter.close(60)
        elapsed = time.monotonic() - start
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "fetch_seconds")
    assert 1 <= len(points) <= elapsed / 0.5 + 2


def test_without_a_run_nothing_happens_and_mlflow_is_not_imported() -> None:
    code = (
        "import sys; from airdata.metrics import Reporter\n"
        "r = Reporter(interval=0.01); r.put('a', 1.0); r.close()\n"
        "assert 'mlflow' not in sys.modules\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=120)


def test_a_run_named_by_the_environment_is_used() -> None:
    import mlflow

    with mlflow.start_run() as run:
        pass
    code = "from airdata.metrics import Reporter\nr = Reporter(); r.put('a', 5.0); r.close(100)"
    environ = {**os.environ, "MLFLOW_RUN_ID": run.info.run_id}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=150)
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {"a": 5.0}


def test_other_ranks_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with mlflow.start_run() as run:
        reporter = Reporter()
        reporter.put("a", 1.0)
        reporter.close(60)
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {}


def test_a_tracking_store_that_fails_costs_one_warning(monkeypatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # no such run
    reporter = Reporter(interval=0.05)
    for number in range(3):
        reporter.put(f"key{number}", 1.0)
        time.sleep(0.1)
    reporter.close(60)
    warnings = [record for record in caplog.records if record.name.startswith("airdata")]
    assert len(warnings) == 1
    assert "training goes on" in warnings[0].getMessage()


EPOCHS = """
    import os, sys, threading, time, warnings
    warnings.simplefilter("ignore")
    from airdata import DataLoader, UCVolumeDataset
    from airdata.metrics import Reporter

    volume, connected = sys.argv[1:]
    loader = DataLoader(UCVolumeDataset(volume), batch_size=2, num_workers=1)
    loader._reporter = Reporter(interval=0.01)
    deadline = time.monotonic() + 100
    while not os.path.exists(connected):  # until the thread that reports hangs
        assert time.monotonic() < deadline, "nothing was sent"
        assert len(list(loader)) == 20
    start = time.monotonic()
    assert len(list(loader)) == 20
    print(time.monotonic() - start)
    print([thread.is_alive() for thread in threading.enumerate() if thread.name == "airdata-reporter"])
"""


def test_a_tracking_server_that_accepts_and_never_answers_slows_no_epoch(volume, program, finish, tmp_path) -> None:
    connected = tmp_path / "connected"

    def accept() -> None:
        peers.append(server.accept())
        connected.touch()

    peers: list = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept)
        accepting.start()
        started = time.monotonic()
        process = program(
            EPOCHS,
            volume(40),
            connected,
            MLFLOW_RUN_ID="0" * 32,
            MLFLOW_TRACKING_URI=f"http://127.0.0.1:{server.getsockname()[1]}",
            MLFLOW_HTTP_REQUEST_TIMEOUT=600,
        )
        seconds, alive = finish(process).splitlines()
        accepting.join()
        assert alive == "[True]"  # it waits for the answer all the time
        assert float(seconds) < 100
        assert time.monotonic() - started < 300  # and the program does not wait for it at its end


def test_totals_go_along_with_what_is_sent() -> None:
    import mlflow

    class Loader:
        counters = Counters(files=3, hits=1, misses=2, bytes_fetched=100, retries=4, bad_files=5)

        def totals(self):
            return self.counters.as_metrics()

    loader = Loader()
    with mlflow.start_run() as run:
        reporter = Reporter(interval=60)
        reporter.watch(loader.totals)
        reporter.put("fetch_seconds", 1.0)
        reporter.close(60)
    sent = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert sent == {
        "fetch_seconds": 1.0, "fetch_files": 3, "fetch_bytes": 100, "fetch_hits": 1, "fetch_retries": 4, "fetch_bad_files": 5,
    }  # fmt: skip


def test_the_last_points_of_a_short_program_arrive_though_nobody_closes_anything() -> None:
    import mlflow

    with mlflow.start_run() as run:
        pass
    code = "from airdata import metrics\nmetrics._EXIT_SECONDS = 100\nr = metrics.Reporter(); r.put('a', 5.0)"
    environ = {**os.environ, "MLFLOW_RUN_ID": run.info.run_id}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=150)
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {"a": 5.0}


def test_a_reporter_that_is_no_longer_used_sends_the_rest_and_ends_its_thread() -> None:
    import mlflow

    with mlflow.start_run() as run:
        reporter = Reporter(interval=3600)
        reporter.put("a", 5.0)
        [thread] = [thread for thread in threading.enumerate() if thread.name == "airdata-reporter"]
        del reporter
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {"a": 5.0}


def test_loaders_that_report_the_same_key_one_after_the_other_go_on_counting_its_steps() -> None:
    import mlflow

    with mlflow.start_run() as run:
        for value in (1.0, 2.0):
            reporter = Reporter(interval=60)
            reporter.put("a", value)
            reporter.close(60)
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "a")
    assert [(point.value, point.step) for point in points] == [(1.0, 1), (2.0, 2)]


def test_a_forked_child_sends_nothing(monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    reporter = Reporter(interval=60)
    pid = os.fork()
    if pid == 0:
        reporter.put("a", 1.0)
        reporter.close(1)
        os._exit(0 if threading.active_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_reporter_can_travel_by_pickle() -> None:
    copy = pickle.loads(pickle.dumps(Reporter(interval=7.0, rank=0)))
    assert isinstance(copy, Reporter)
    copy.close()
