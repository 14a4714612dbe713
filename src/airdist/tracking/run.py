"""The MLflow run of a launch, from its creation in the caller to its end.

In the caller, `start_run` makes one run, a child of the run that is active in the calling thread if there is one, and
`LaunchRun.finish` alone ends it: FINISHED, FAILED or KILLED with the launch. `LaunchRun.env` tells the ranks of it;
what they do with it is in `airdist.tracking.rank`. The caller's own state is never touched: not its stack of active
runs, its environment, nor its tracking URI. Tracking trouble never stops training: each contact with a server is
bounded, and what fails becomes one warning.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from airdist.environ import LAUNCH_RUN_ID
from airdist.tracking.uri import absolute_uri, is_local, redact, run_page, split_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["LaunchRun", "end_run", "start_run"]

logger = logging.getLogger("airdist")
T = TypeVar("T")

_REMOTE_TIMEOUT = 10.0
# A local database does not hang, but creating its tables took 2.6 s on a quiet machine of two cores.
_LOCAL_TIMEOUT = 60.0
_UPLOAD_TIMEOUT = 120.0
_BATCH = 100  # MLflow's limit on parameters or tags in one request


@dataclass
class LaunchRun:
    """The MLflow run of one launch. Made by `start_run`; ended by the caller alone, whatever ranks do.

    Attributes:
        run_id: MLflow's id of the run.
        experiment_id: Id of the experiment it is in.
        experiment_name: Name of that experiment.
        tracking_uri: Where it is, absolute. May hold a password: print `link` instead.
        url: Address of the run's page, or None if no server shows it. Holds no password.
    """

    run_id: str
    experiment_id: str
    experiment_name: str
    tracking_uri: str = field(repr=False)
    url: str | None
    _client: Any = field(repr=False)
    _timeout: float = field(repr=False)
    _finished: bool = field(default=False, repr=False)

    @property
    def link(self) -> str:
        """Where a person finds the run: its page, or the command that shows it."""
        return self.url or f"mlflow ui --backend-store-uri {redact(self.tracking_uri)}  (run {self.run_id})"

    def env(self) -> dict[str, str]:
        """Environment for the ranks, which makes the run the one that their `mlflow.log_metric` logs to.

        A password in an http(s) tracking URI travels as MLflow's own variables instead, because MLflow prints the URI.
        """
        uri, user, password = split_credentials(self.tracking_uri)
        env = {
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_EXPERIMENT_ID": self.experiment_id,
            "MLFLOW_EXPERIMENT_NAME": self.experiment_name,
            "MLFLOW_RUN_ID": self.run_id,
            LAUNCH_RUN_ID: self.run_id,
        }
        if user:
            env |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
        if "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING" not in os.environ:
            # MLflow refuses to start a run if they are on and psutil is missing.
            env["MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"] = "true" if importlib.util.find_spec("psutil") else "false"
        return env

    def finish(
        self,
        status: Literal["FINISHED", "FAILED", "KILLED"],
        *,
        tags: Mapping[str, str] = {},
        logs: Path | None = None,
    ) -> None:
        """End the run. Never raises; what fails is warned of. A second call does nothing.

        Args:
            status: How the launch ended.
            tags: Set on the run; a name without a dot gets the prefix `airdist.`.
            logs: A directory whose files become the run's artifacts, under `logs`: after the status is set, and for at
                most two minutes.
        """
        if self._finished:
            return
        self._finished = True
        with _warned_of(f"MLflow run {self.run_id} may still say RUNNING"):
            _bounded(lambda: _end(self._client, self.run_id, status), self._timeout)
        if tags:
            with _warned_of(f"tags of MLflow run {self.run_id} are missing"):
                _bounded(lambda: _set_tags(self._client, self.run_id, tags), self._timeout)
        if logs is not None:
            upload = self._client.log_artifacts
            with _warned_of(f"logs are not all with MLflow run {self.run_id}; they stay in {logs}"):
                _bounded(lambda: upload(self.run_id, str(logs), "logs"), _UPLOAD_TIMEOUT)


def start_run(*, name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> LaunchRun | None:
    """Make the MLflow run of a launch: a child of the calling thread's active run, or a run of its own.

    It goes to the tracking URI and experiment that MLflow itself would choose in the caller, now (`set_experiment`,
    `MLFLOW_EXPERIMENT_NAME`, ...). The host, the git commit and MLflow's own tags (user, source) are added.

    Args:
        name: Name of the run.
        params: Logged as parameters.
        tags: Set on the run; a name without a dot gets the prefix `airdist.`.

    Returns:
        The run, or None, after one warning, if MLflow is missing, refuses, or does not answer: within 10 s for a server
        and 60 s for a local database, or what `AIRDIST_TRACKING_TIMEOUT` (seconds) says. Never raises.
    """
    with _warned_of("MLflow does not track this launch"):
        mlflow = importlib.import_module("mlflow")
        uri = absolute_uri(mlflow.get_tracking_uri(), Path.cwd())
        # Active runs are the thread's own, so that it must be asked for here.
        active = mlflow.active_run()
        usual = _LOCAL_TIMEOUT if is_local(uri) else _REMOTE_TIMEOUT
        timeout = float(os.environ.get("AIRDIST_TRACKING_TIMEOUT") or usual)

        def create() -> LaunchRun:
            return _create(mlflow, uri, active, timeout, name=name, params=params, tags=tags)

        # A run that is there only after the launch has stopped waiting for it must not say RUNNING for ever.
        return _bounded(create, timeout, late=lambda run: run.finish("KILLED"))
    return None


def end_abandoned() -> None:
    """End the run that this process's environment names as KILLED: what the agent has done when its caller is gone."""
    end_run(os.environ[LAUNCH_RUN_ID], "KILLED")


def end_run(run_id: str, status: Literal["FAILED", "KILLED"]) -> None:
    """End a run that another process has made. Never raises; what fails is warned of."""
    with _warned_of(f"MLflow run {run_id} may still say RUNNING"):
        client = importlib.import_module("mlflow").MlflowClient()
        _bounded(lambda: _end(client, run_id, status), _REMOTE_TIMEOUT)


def _create(
    mlflow: Any,
    uri: str,
    active: Any,
    timeout: float,
    *,
    name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
) -> LaunchRun:
    client = mlflow.MlflowClient(tracking_uri=uri)
    # The variable is how `mlflow run` and job schedulers hand a run to a process that has not used MLflow yet.
    parent = active.info.run_id if active is not None else os.environ.get("MLFLOW_RUN_ID")
    if parent:
        experiment_id = str(client.get_run(parent).info.experiment_id)
    else:
        # Not public, but the one place that knows set_experiment(), both variables and a Databricks notebook's default.
        experiment_id = str(mlflow.tracking.fluent._get_experiment_id())  # noqa: SLF001
    experiment = client.get_experiment(experiment_id)
    own = {"host": socket.gethostname(), "git_commit": _git_commit()}
    all_tags = _context_tags() | _prefixed({key: value for key, value in own.items() if value} | dict(tags))
    if parent:
        all_tags["mlflow.parentRunId"] = parent
    run_id = client.create_run(experiment_id, run_name=name, tags=all_tags).info.run_id
    with _warned_of(f"parameters of MLflow run {run_id} are missing"):
        for batch in _batches([mlflow.entities.Param(key, redact(str(value))) for key, value in params.items()]):
            client.log_batch(run_id, params=batch)
    url = run_page(uri, experiment_id, run_id, _workspace() if uri.startswith("databricks") else None)
    return LaunchRun(run_id, experiment_id, experiment.name, uri, url, client, timeout)


def _context_tags() -> dict[str, str]:
    """What MLflow's own `start_run` would tag: user, source, notebook."""
    with contextlib.suppress(Exception):
        return dict(importlib.import_module("mlflow.tracking.context.registry").resolve_tags())
    return {}


def _workspace() -> str | None:
    with contextlib.suppress(Exception):
        url = importlib.import_module("mlflow.utils.databricks_utils").get_workspace_url()
        if url:
            return str(url)
    return os.environ.get("DATABRICKS_HOST")


def _git_commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False, stdin=subprocess.DEVNULL)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _end(client: Any, run_id: str, status: str) -> None:
    # set_terminated() prints the tracking URI, password and all. The store below it is what MLflow's plugins implement.
    store = getattr(getattr(client, "_tracking_client", None), "store", None)
    if store is None:
        client.set_terminated(run_id, status)
    else:
        code = importlib.import_module("mlflow.entities").RunStatus.from_string(status)
        store.update_run_info(run_id, code, int(time.time() * 1000), None)


def _set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    tag = importlib.import_module("mlflow.entities").RunTag
    for batch in _batches([tag(key, value) for key, value in _prefixed(tags).items()]):
        client.log_batch(run_id, tags=batch)


def _prefixed(tags: Mapping[str, str]) -> dict[str, str]:
    return {key if "." in key else f"airdist.{key}": redact(str(value)) for key, value in tags.items()}


def _batches(items: list[T]) -> Iterable[list[T]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _bounded(work: Callable[[], T], seconds: float, late: Callable[[T], None] = lambda _: None) -> T:
    """Run the work in a thread of its own and wait for it no longer than that; what comes later goes to `late`.

    MLflow's own time-outs (120 s and 7 retries) are environment variables, and the environment is the caller's.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  handed to whoever waits
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            late(result)

    threading.Thread(target=run, name="airdist-mlflow", daemon=True).start()
    try:
        return future.result(seconds)
    except FutureTimeoutError:
        # It can be cancelled until its result is there: exactly one side wins.
        if future.cancel():
            raise TimeoutError(f"no answer in {seconds:g} s") from None
        return future.result()
    except BaseException:
        future.cancel()
        raise


@contextlib.contextmanager
def _warned_of(consequence: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  tracking trouble never stops training
        logger.warning("%s: %s: %s", consequence, type(error).__name__, redact(str(error)))
