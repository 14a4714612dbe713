"""Everything that is decided before a process exists: engine, devices, payload, run directory, MLflow run.

The order is that of cost and consequence: what can be refused is refused first, and nothing is written before it has
been.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airdist.devices import allocate, check_accelerator_type
from airdist.engines import choose_engine
from airdist.engines.base import Order
from airdist.environ import LOOPBACK, carried, launch_environ
from airdist.errors import LaunchError
from airdist.payload import pack
from airdist.rundir import RunDirectory, run_root
from airdist.spec import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.devices import Allocation
    from airdist.engines.base import Engine
    from airdist.settings import Settings
    from airdist.tracking.run import LaunchRun

__all__ = ["Plan", "make_plan"]

_LIMITS = ("start_timeout", "heartbeat")


@dataclass(frozen=True)
class Plan:
    """What has been decided of a launch when its agents are about to start.

    Attributes:
        name: what it is called.
        settings: how the user wants it.
        engine: what starts its agents.
        allocation: devices and number of ranks on this machine; None where the nodes find out themselves.
        directory: its run directory, which holds the payload.
        run: its MLflow run, or None.
        withheld: variables that look like secrets and are not sent to other machines.
    """

    name: str
    settings: Settings
    engine: Engine
    allocation: Allocation | None
    directory: RunDirectory
    run: LaunchRun | None
    withheld: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Number of ranks, as far as it is known before any node has come."""
        if self.allocation is not None:
            return self.allocation.nprocs
        wanted = self.settings.num_accelerators
        return None if wanted is None else wanted * self.settings.nodes

    def order(self, *, forward_logs: bool) -> Order:
        """What the engine is asked for."""
        settings = self.settings
        spec = AgentSpec(
            run_dir=str(self.directory.path),
            nprocs=self.allocation.nprocs if self.allocation else None,
            cwd=os.getcwd(),
            job=self.directory.path.name,
            timeout=settings.timeout,
            grace=settings.grace_seconds,
            max_restarts=settings.max_restarts,
            visible=list((self.allocation and self.allocation.per_rank_visible) or ()) or None,
            forward_logs=forward_logs,
            nodes=settings.nodes,
            remote=None if self.engine.local else self._remote(),
        )
        limits = {key: settings.engine_options[key] for key in _LIMITS if settings.engine_options.get(key)}
        job = self.directory.path.name
        environ = self._environ() if self.engine.local else {}
        return Order(job, spec._replace(**limits), self.directory.path, environ, settings.engine_options)

    def _overrides(self) -> dict[str, str]:
        return {**self.settings.env, **(self.run.env() if self.run else {})}

    def _environ(self) -> dict[str, str]:
        """The environment of an agent on this machine, and so of its ranks."""
        assert self.allocation is not None
        return launch_environ(
            os.environ,
            overrides=self._overrides(),
            nprocs=self.allocation.nprocs,
            visible=None if self.allocation.per_rank_visible else self.allocation.visible,
            interface=LOOPBACK,
        )

    def _remote(self) -> dict[str, Any]:
        """What agents on other machines need to know of this one; it travels over their link and is never written."""
        from airdist.versions import versions_here  # noqa: PLC0415 - 40 ms that a launch on this machine need not take

        settings = self.settings
        kind = check_accelerator_type(settings.accelerator_type)
        return {
            "environ": carried(os.environ)[0],
            "overrides": self._overrides(),
            "accelerators": {
                "num_accelerators": settings.num_accelerators,
                "accelerator_type": kind,
                "isolate": settings.isolate_devices,
            },
            "versions": versions_here(),
            "path": [entry for entry in sys.path if entry and os.path.exists(entry)],
            "cwd": os.getcwd(),
        }


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
    engine = choose_engine(settings.engine, remote=settings.remote, environ=environ)
    engine.check(nodes=settings.nodes, options=settings.engine_options)
    allocation = (
        allocate(
            settings.num_accelerators, settings.accelerator_type, isolate=settings.isolate_devices, environ=environ
        )
        if engine.local
        else None
    )
    payload = pack(function, args, kwargs)
    name = settings.name or str(getattr(function, "__name__", type(function).__name__))
    root = run_root(environ)
    try:
        directory = RunDirectory.create(root, name)
        directory.payload.write_bytes(payload)
    except OSError as error:
        raise LaunchError(f"no run directory can be made in {root} ({error}); AIRDIST_RUN_DIR names another") from error
    withheld = () if engine.local else tuple(name for name in carried(os.environ)[1] if name not in settings.env)
    plan = Plan(name, settings, engine, allocation, directory, None, withheld)
    return replace(plan, run=_start_run(plan)) if settings.tracking else plan


def _start_run(plan: Plan) -> LaunchRun | None:
    from airdist.tracking import run  # noqa: PLC0415 - not needed by a launch without tracking

    kind = plan.allocation.accelerator_type if plan.allocation else plan.settings.accelerator_type
    params = plan.settings.changed() | {
        "processes": plan.world_size or "every accelerator",
        "accelerator_type": kind or ("cpu" if plan.allocation else "any"),
    }
    return run.start_run(name=plan.name, params=params, tags={"run_dir": str(plan.directory.path)})
