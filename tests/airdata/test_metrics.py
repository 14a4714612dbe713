"""Counters add up; the reporter never gets in the way."""

from __future__ import annotations

import os
import pickle
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


def test_a_tracking_server_that_does_not_answer_does_not_hold_up_anybody(monkeypatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        import mlflow

        monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
        mlflow.set_tracking_uri(f"http://127.0.0.1:{silent.getsockname()[1]}")
        try:
            reporter = Reporter(interval=0.01)
            slowest = 0.0
            for _ in range(200):
                start = time.perf_counter()
                reporter.put("a", 1.0)
                slowest = max(slowest, time.perf_counter() - start)
            start = time.monotonic()
            reporter.close(0.2)
            assert time.monotonic() - start < 5
            assert slowest < 2
        finally:
            mlflow.set_tracking_uri(None)


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
