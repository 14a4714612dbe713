"""Everything that is decided before a process exists: engine, devices, payload, run directory, MLflow run.

The order is that of cost and consequence: what can be refused is refused first, and nothing is written before it has
been.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airdist.agent import AgentSpec
from airdist.devices import allocate
from airdist.engines import choose_engine
from airdist.environ import launch_environ
from airdist.errors import LaunchError
from airdist.payload import pack
from airdist.rundir import RunDirectory, run_root

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from airdist.devices import Allocation
    from airdist.engines.base import Engine
    from airdist.settings import Settings
    from airdist.tracking.run import LaunchRun

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """What has been decided of a launch when its agent is about to start.

    Attributes:
        name: what it is called.
        settings: how the user wants it.
        engine: what starts its agent.
        allocation: its devices and number of ranks.
        directory: its run directory, which holds the payload.
        run: its MLflow run, or None.
    """

    name: str
    settings: Settings
    engine: Engine
    allocation: Allocation
    directory: RunDirectory
    run: LaunchRun | None

    def spec(self, *, forward_logs: bool) -> AgentSpec:
        """What the agent is asked to run."""
        settings, masks = self.settings, self.allocation.per_rank_visible
        return AgentSpec(
            run_dir=str(self.directory.path),
            nprocs=self.allocation.nprocs,
            cwd=os.getcwd(),
            timeout=settings.timeout,
            grace=settings.grace_seconds,
            max_restarts=settings.max_restarts,
            visible=list(masks) if masks else None,
            forward_logs=forward_logs,
        )

    def environ(self) -> dict[str, str]:
        """The environment of the agent, and so of the ranks."""
        return launch_environ(
            os.environ,
            overrides={**self.settings.env, **(self.run.env() if self.run else {})},
            nprocs=self.allocation.nprocs,
            visible=None if self.allocation.per_rank_visible else self.allocation.visible,
        )


def make_plan(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings
) -> Plan:
    """Decide a launch, and write its payload.

    Raises:
        DeviceError: when the accelerators asked for are not there.
        PayloadError: when the function or an argument cannot be sent.
        LaunchError: when the engine or the run directory cannot be had.
    """
    environ = os.environ | dict(settings.env)
    engine = choose_engine(settings.engine, nodes=settings.nodes, remote=settings.remote, environ=environ)
    allocation = allocate(
        settings.num_accelerators, settings.accelerator_type, isolate=settings.isolate_devices, environ=environ
    )
    payload = pack(function, args, kwargs)
    name = settings.name or str(getattr(function, "__name__", type(function).__name__))
    root = run_root(environ)
    try:
        directory = RunDirectory.create(root, name)
        directory.payload.write_bytes(payload)
    except OSError as error:
        raise LaunchError(f"no run directory can be made in {root} ({error}); AIRDIST_RUN_DIR names another") from error
    run = _start_run(name, settings, allocation, directory.path) if settings.tracking else None
    return Plan(name, settings, engine, allocation, directory, run)


def _start_run(name: str, settings: Settings, allocation: Allocation, run_dir: Path) -> LaunchRun | None:
    from airdist.tracking import run  # noqa: PLC0415 - not needed by a launch without tracking

    params = settings.changed() | {
        "processes": allocation.nprocs,
        "accelerator_type": allocation.accelerator_type or "cpu",
    }
    return run.start_run(name=name, params=params, tags={"run_dir": str(run_dir)})
