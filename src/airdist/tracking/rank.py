"""In a rank: the launch's MLflow run stays open for all, and nothing logged is lost at the exit.

MLflow's `start_run()` resumes the run that `MLFLOW_RUN_ID` names, once: it deletes the variable, and leaving the `with`
block ends the run for every rank (the first to leave silenced the system metrics of all others, and what was logged
afterwards, or from another thread, went to a stray run). `prepare_rank` therefore waits for the user's code to import
MLflow and then changes three public functions, for the launch's run alone:

* `MlflowClient.set_terminated` does not end it;
* `mlflow.start_run` resumes it, in any thread, before and after blocks of the user's own;
* `mlflow.set_experiment`, with another experiment, lets go of it, where MLflow would refuse to start any run.

`flush_rank` does what MLflow does at a regular exit, for a process that leaves by `os._exit`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

from airdist.environ import LAUNCH_RUN_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.abc import Loader
    from types import ModuleType

__all__ = ["after_import", "flush_rank", "prepare_rank"]

logger = logging.getLogger("airdist")

_FLUSH_TIMEOUT = 10.0


def prepare_rank() -> Callable[[], None]:
    """Make MLflow, once user code imports it, treat the launch's run as the launch's. Imports nothing itself.

    Returns:
        What lets go of the run, for a process that lives longer than the launch.
    """
    run_id = os.environ.get(LAUNCH_RUN_ID)
    if not run_id:
        return lambda: None
    # System metrics are those of the node: one rank of each node measures them.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        os.environ["MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"] = "false"
    os.environ.setdefault("MLFLOW_SYSTEM_METRICS_NODE_ID", f"node{os.environ.get('NODE_RANK', '0')}")
    keeper = _Keeper(run_id, os.environ.get("MLFLOW_EXPERIMENT_ID"))
    after_import("mlflow.tracking.client", keeper.patch_client)
    after_import("mlflow.tracking.fluent", keeper.patch_fluent)
    return keeper.release


def flush_rank(*, failed: bool = False, timeout: float = _FLUSH_TIMEOUT) -> None:
    """Wait for metrics logged in the background, and end the runs that user code left open. Never raises.

    Does nothing in a process that has not used MLflow. The launch's own run is left to the launcher.

    Args:
        failed: The rank failed; its open runs end as FAILED, not FINISHED.
        timeout: Seconds after which what is left is given up.
    """
    fluent = sys.modules.get("mlflow.tracking.fluent")
    if fluent is None:
        return
    open_runs: list[str] = []
    with contextlib.suppress(Exception):
        # The stack is the thread's own, so that it must be read here; active_run() shows its top only.
        open_runs = [run.info.run_id for run in fluent._active_run_stack.get()]  # noqa: SLF001
    # Asking a store to flush creates one, in the working directory, where nothing has been logged.
    background = any(thread.name.startswith("MLflow") for thread in threading.enumerate())

    def flush() -> None:
        with contextlib.suppress(Exception):
            if background:
                fluent.flush_async_logging()
            client = fluent.MlflowClient()
            for run_id in reversed(open_runs):
                client.set_terminated(run_id, "FAILED" if failed else "FINISHED")

    if background or open_runs:
        thread = threading.Thread(target=flush, name="airdist-mlflow-flush", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("MLflow did not take the last metrics of this rank within %g s; they are lost.", timeout)


class _Keeper:
    """Keeps the launch's run open and resumable in this process."""

    def __init__(self, run_id: str, experiment_id: str | None) -> None:
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.let_go = False

    def release(self) -> None:
        """Treat the run as any other from now on."""
        self.let_go = True

    def patch_client(self, module: Any) -> None:
        end = module.MlflowClient.set_terminated

        @functools.wraps(end)
        def set_terminated(client: Any, run_id: str, *args: Any, **kwargs: Any) -> None:
            if run_id != self.run_id:
                end(client, run_id, *args, **kwargs)
            elif not self.let_go:
                # For child processes: end_run() has just taken it away.
                os.environ["MLFLOW_RUN_ID"] = run_id

        module.MlflowClient.set_terminated = set_terminated

    def patch_fluent(self, module: Any) -> None:
        # It announces each start and stop, and a run may be resumed many times.
        logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
        package = sys.modules.get("mlflow")
        for name, patched in (
            ("start_run", self._start_run(module, module.start_run)),
            ("set_experiment", self._set_experiment(module.set_experiment)),
        ):
            # Where the process had imported MLflow before it became a rank, the package has the function already.
            if getattr(package, name, None) is getattr(module, name):
                setattr(package, name, patched)
            setattr(module, name, patched)

    def _start_run(self, module: Any, start: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(start)

        @functools.wraps(start)
        def start_run(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            asked = call.arguments
            active = module.active_run()
            if active is not None and active.info.run_id == self.run_id and not asked.get("nested"):
                # Logging started it; MLflow would refuse to start another inside of it.
                module.end_run()
                active = None
            if active is None and not self.let_go and not self._is_another(asked):
                # By argument: the variable is the process's, and threads may be here at once.
                asked["run_id"] = self.run_id
                if self.run_id in getattr(module, "run_id_to_system_metrics_monitor", {}):
                    # Another thread's; two would record every sample twice.
                    asked.setdefault("log_system_metrics", False)
            elif os.environ.get("MLFLOW_RUN_ID") == self.run_id:
                os.environ.pop("MLFLOW_RUN_ID", None)
            return start(*call.args, **call.kwargs)

        return start_run

    def _is_another(self, asked: Mapping[str, Any]) -> bool:
        """Whether the arguments of `start_run` name a run or a place that is not the launch's."""
        experiment = asked.get("experiment_id")
        return (
            asked.get("run_id") not in {None, self.run_id}
            or asked.get("parent_run_id") is not None
            or (experiment is not None and str(experiment) != self.experiment_id)
        )

    def _set_experiment(self, choose: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(choose)
        def set_experiment(*args: Any, **kwargs: Any) -> Any:
            experiment = choose(*args, **kwargs)
            self.let_go = experiment.experiment_id != self.experiment_id
            if self.let_go:
                logger.warning(
                    "set_experiment(%r) in a rank chooses another experiment than the launch: runs started from now on "
                    "are this rank's own. Call it before the launch to have all ranks log to one run there.",
                    experiment.name,
                )
            # Both variables reach child processes, and MLflow refuses a pair that disagrees.
            os.environ["MLFLOW_EXPERIMENT_NAME"] = experiment.name
            return experiment

        return set_experiment


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call the action with the module right after its first import, or now if it has been imported.

    An action that fails is logged: an import must not fail for it.
    """
    module = sys.modules.get(name)
    if module is not None:
        _act(action, module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook:
    """Finds one module as the finders behind it do, and gives it a loader that acts after loading.

    The protocol is enough: importing the base classes of `importlib.abc` would cost each rank 10 ms at its start.
    """

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = cast("Loader", _ActingLoader(spec.loader, self))
                return spec
        return None


class _ActingLoader:
    def __init__(self, loader: Loader, hook: _ImportHook) -> None:
        self.loader = loader
        self.hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # inspect and importlib.resources ask the module for its loader and know the real one only.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self.hook)
        _act(self.hook.action, module)


def _act(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "%s is not as expected (%s: %s); tracking of this rank may be incomplete.",
            module.__name__,
            type(error).__name__,
            error,
        )
