"""Ray: one bundle of a placement group for each node, and one task in it that runs the node's agent.

    caller ── order (stdin) ──> driver process: airdist.engines.ray_job ── task ──> tether ── agent of node k
           <── queued, running, ended (stdout) ──

The driver is a process of its own. So nothing of the caller is changed (Ray would install a SIGTERM handler, and has
one connection for a whole process), a caller that is connected to Ray stays so, and launches from several threads do
not meet. It ends with the caller, however that ends, and Ray frees what the driver of a job had asked for.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from airdist import processes
from airdist.engines import ray_job
from airdist.engines.remote import RemoteEngine
from airdist.engines.tether import tethered
from airdist.errors import LaunchError
from airdist.failure import tail
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.engines.base import Order
    from airdist.engines.remote import AgentCommand, RemoteAgents

__all__ = ["RayEngine"]

logger = logging.getLogger("airdist")

_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
_AGENT_SECONDS = 25.0  # for an agent that is asked to end; its ranks have 10 by default
_AGAIN_SECONDS = 5.0
_DRIVER_SECONDS = 40.0  # to end agents that do not end by themselves, and to leave the cluster


class RayEngine(RemoteEngine):
    """Starts agents as tasks of a running Ray cluster."""

    name: ClassVar[str] = "ray"
    keys: ClassVar[frozenset[str]] = frozenset({
        "address", "strategy", "cpus", "gpus", "resources", "runtime_env",
    })  # fmt: skip

    def __init__(self) -> None:
        self._chosen: dict[str, Any] = {}

    def check(self, *, nodes: int, options: Mapping[str, Any]) -> None:
        """Refuse options that do not exist, and say early that Ray is not installed."""
        super().check(nodes=nodes, options=options)
        if options.get("strategy", _STRATEGIES[0]) not in _STRATEGIES:
            raise LaunchError(f"strategy={options['strategy']!r}: it is one of {', '.join(_STRATEGIES)}")
        for name in ("cpus", "gpus"):
            value = options.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
                raise LaunchError(f"engine_options: {name}={value!r}: it is a number for each node, 0 or more")
        if find_spec("ray") is None:
            raise LaunchError("engine='ray' needs Ray: install 'airdata[ray]'")

    def start(self, order: Order) -> RemoteAgents:
        """As every engine of several machines; the variables of `runtime_env` win over the caller's."""
        assert order.spec.remote is not None
        remote = dict(order.spec.remote)
        self._chosen = {
            **_connection(),
            **{name: value for name, value in order.options.items() if name in self.keys and value is not None},
            "num_accelerators": remote["accelerators"]["num_accelerators"],
            "accelerator_type": remote["accelerators"]["accelerator_type"],
        }
        variables = (self._chosen["runtime_env"] or {}).get("env_vars") or {}
        remote["overrides"] = {**variables, **remote["overrides"]}
        # It holds the node's own way to what `runtime_env` has brought there; the caller's `sys.path` travels anyway.
        remote["environ"] = {name: value for name, value in remote["environ"].items() if name != "PYTHONPATH"}
        return super().start(replace(order, spec=order.spec._replace(remote=remote)))

    def spawn(self, command: AgentCommand) -> _Driver:
        """Start the driver."""
        agents = [
            tethered(command.argv(node), seconds=_AGENT_SECONDS, python=command.python) for node in range(command.nodes)
        ]
        return _Driver(
            command,
            ray_job.Order(
                job=command.job,
                agents=agents,
                environ=command.environ(),
                seconds=command.seconds,
                # The interpreter of a node's worker is that of its `runtime_env`, unless the user has named another.
                any_python=command.python if command.python == sys.executable else None,
                **self._chosen,
            ),
        )


class _Driver:
    """The process that has placed, or tries to place, the agents; see `airdist.engines.remote.Spawned`."""

    def __init__(self, command: AgentCommand, order: ray_job.Order) -> None:
        self._job, self._order = command.job, order
        self._log = RunDirectory(command.directory).agent_log
        self._start()

    def _start(self) -> None:
        import cloudpickle  # noqa: PLC0415 - 40 ms that an import of this package need not take

        self._state, self._said, self._words = "running", b"", f"connecting to Ray at {self._order.address!r}"
        self._job_id: str | None = None
        self._warned = self._placed = False
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # within `ray job submit`, what is asked for here wins
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *processes.program("airdist.engines.ray_job")],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._stdin, self._stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        os.set_blocking(self._stdout.fileno(), False)
        with suppress(BrokenPipeError):  # it could not even start; its output says why
            self._stdin.write(pickle.dumps(sys.path) + cloudpickle.dumps(self._order))
            self._stdin.flush()

    @property
    def job_id(self) -> str | None:
        """Ray's number of the driver's job, once it is connected."""
        return self._job_id

    def state(self) -> str:
        """As the driver has last said."""
        self._hear()
        return self._state

    def words(self) -> str:
        """What the driver has last said of the cluster, and the end of what it has printed."""
        self._hear()
        return "; ".join(filter(None, (self._words, *tail(self._log))))

    def again(self) -> bool:
        """Place all agents again, by another driver: what the cluster has by now may be other machines."""
        self.close(_AGAIN_SECONDS)
        self._start()
        return True

    def close(self, seconds: float) -> None:
        """Wait for the driver, which ends with the agents; without its stdin it ends them."""
        if not self._ends_within(seconds if self._placed else 0):
            with suppress(BrokenPipeError):
                self._stdin.close()
            if not self._ends_within(_DRIVER_SECONDS):
                self._process.kill()  # Ray notices, and ends the tasks of its job
                self._process.wait()
        for stream in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):
                stream.close()

    def _ends_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._hear()
        return self._process.returncode is not None

    def _hear(self) -> None:
        """Take in what the driver has said."""
        if self._stdout.closed:
            return
        ended = self._process.poll() is not None  # asked first, so that its last words are not missed
        with suppress(BlockingIOError):
            while data := os.read(self._stdout.fileno(), 1 << 16):
                self._said += data
        *lines, self._said = self._said.split(b"\n")
        for said in map(json.loads, lines):
            if said["state"] == "queued" and said["words"] and not self._warned:
                self._warned = True
                logger.warning("%s waits: %s", self._job, said["words"])
            self._state, self._words = said["state"], said["words"]
            self._placed = self._placed or self._state == "running"
            self._job_id = said.get("job_id", self._job_id)
        if ended:
            self._state = "ended"


def _connection() -> dict[str, Any]:
    """Address and `runtime_env` of the cluster that this process is connected to, else those of the environment."""
    found: dict[str, Any] = {"address": os.environ.get("RAY_ADDRESS") or "auto", "runtime_env": None}
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        with suppress(Exception):  # connected through a client, which need not know where the cluster is
            context = ray.get_runtime_context()
            found = {"address": str(context.gcs_address), "runtime_env": dict(context.runtime_env)}
    return found
