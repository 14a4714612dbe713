"""The Ray driver of a launch: places one agent on each node, tells how that goes, and leaves nothing in the cluster.

    stdin: the caller's `sys.path` and the order, then nothing; its end means that the agents are to end
    stdout: one JSON object a line, {"state": "queued" | "running" | "ended", "words": …}

The order and its secret come through a pipe, and go on as arguments of tasks, by Ray's own connections.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airdist.engines import held
from airdist.engines.held import hold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Order", "bundle_for", "fits", "main", "run_agent"]

_PLACE_SECONDS = 1  # between two looks at the cluster while it has no room
_END_SECONDS = 35.0  # for agents that were asked to end
_CONNECT_SECONDS = 15.0
_TAIL_BYTES = 2000
_SHARE_OF_TYPE = 0.001  # of the resource by which Ray marks nodes that have a type of accelerator
# What Ray tells its own worker, and nobody means for a rank: OpenMP gets the rank's share of the processors.
_WORKERS_OWN = frozenset({"OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV"})


@dataclass(frozen=True)
class Order:
    """What the driver is to do.

    Attributes:
        job: name of the launch, and of its placement group.
        address: of the cluster, as `ray.init` takes it.
        agents: command line of the agent of each node.
        environ: what goes into their environment; it holds the secret.
        seconds: how long a request is kept up that the cluster, as it is, can never meet; it may still grow.
        strategy: of the placement group.
        num_accelerators: processes on each node, or None for what the nodes have.
        accelerator_type: such as "GPU_8xH100" or "H100", or None.
        cpus: processors for each node; None: one for each process.
        gpus: GPUs for each node; None: one for each process, if the cluster has any.
        resources: Ray's custom resources for each node.
        runtime_env: as `ray.init` takes it.
        any_python: interpreter in `agents` in whose place the worker's own may stand.
    """

    job: str
    address: str
    agents: Sequence[Sequence[str]]
    environ: Mapping[str, str] = field(repr=False)
    seconds: float
    strategy: str = "STRICT_SPREAD"
    num_accelerators: int | None = None
    accelerator_type: str | None = None
    cpus: float | None = None
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Any = None
    any_python: str | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.agents)


def bundle_for(order: Order, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What is asked for on each node.

    Args:
        order: what the user wants.
        nodes: all resources of each node that the cluster has at present.
    """
    there = sorted((node.get("GPU", 0) for node in nodes), reverse=True)
    gpus = order.gpus
    if gpus is None:
        # Without a number, all of a node: as many as the last of so many nodes still has.
        all_of_one = there[min(order.nodes, len(there)) - 1] if there else 0
        some = order.accelerator_type is not None or any(there)
        gpus = (order.num_accelerators or max(all_of_one, 1)) if some else 0
    cpus = (order.num_accelerators or max(gpus, 1)) if order.cpus is None else order.cpus
    bundle = {name: float(count) for name, count in {"CPU": cpus, "GPU": gpus}.items() if count}
    model = (order.accelerator_type or "").rpartition("x")[2]
    marks = {name for node in nodes for name in node if model and name == f"accelerator_type:{model}"}
    return {**bundle, **order.resources, **dict.fromkeys(marks, _SHARE_OF_TYPE)}


def fits(bundle: Mapping[str, float], count: int, strategy: str, nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether these nodes, empty, could hold that many bundles."""
    held = [min((int(node.get(name, 0) / share) for name, share in bundle.items()), default=count) for node in nodes]
    if strategy == "STRICT_SPREAD":
        return sum(bundles > 0 for bundles in held) >= count
    return (max(held, default=0) if strategy == "STRICT_PACK" else sum(held)) >= count


def run_agent(argv: Sequence[str], environ: Mapping[str, str], any_python: str | None) -> tuple[int, str]:
    """Run an agent to its end: the task. When the task is cancelled or its worker is gone, the agent is asked to end.

    Returns:
        Its exit code, and the end of its output.
    """
    own = {name: value for name, value in os.environ.items() if name not in _WORKERS_OWN}
    return hold(argv, {**own, **environ}, any_python)


def main() -> None:
    """Serve one launch."""
    report = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is not for the caller's parser
    sys.path[:] = pickle.load(sys.stdin.buffer)  # noqa: S301 - from this process's own parent
    driver = _Driver(pickle.load(sys.stdin.buffer), report)  # noqa: S301 - as above
    threading.Thread(target=driver.watch_caller, daemon=True).start()
    driver.run()
    os._exit(0)  # the interpreter's own way out takes longer, and nothing is left to do


class _Driver:
    """One launch, from the connection to the cluster to the end of all its agents."""

    def __init__(self, order: Order, report: int) -> None:
        self._order = order
        self._report = report
        self._events: queue.SimpleQueue[tuple[int | None, Any]] = queue.SimpleQueue()

    def watch_caller(self) -> None:
        """Notice that the caller has closed its end, or is gone."""
        while os.read(0, 1 << 10):
            pass
        self._events.put((None, None))

    def run(self) -> None:
        """Connect, place, run, and leave."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is to see it
            self._tell("ended", f"{type(error).__name__}: {error}".strip())

    def _tell(self, state: str, words: str = "", **more: Any) -> None:
        with suppress(BrokenPipeError):  # the caller is gone, and the agents end for that
            os.write(self._report, json.dumps({"state": state, "words": words, **more}).encode() + b"\n")

    def _run(self) -> None:
        import ray  # noqa: PLC0415 - from the caller's path
        from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415

        order = self._order
        # The package may be another one on the nodes, or none until `runtime_env` has brought it.
        for module in (sys.modules[__name__], held):
            ray.cloudpickle.register_pickle_by_value(module)
        quiet = {} if "://" in order.address else {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            _knock(order.address)
            ray.init(address=order.address, runtime_env=order.runtime_env, **quiet)
        except OSError as error:
            where = "engine_options={'address': …}, RAY_ADDRESS, or a `ray.init` before, names the cluster"
            raise ConnectionError(f"no Ray at {order.address!r} ({error}); {where}") from None
        group = None
        try:
            self._tell("queued", job_id=ray.get_runtime_context().get_job_id())
            bundle = bundle_for(order, _nodes(ray))
            group = placement_group([bundle] * order.nodes, strategy=order.strategy, name=order.job)
            if self._wait_for_place(ray, group, bundle):
                self._tell("running")
                self._run_agents(ray, group, bundle)
        finally:
            if group is not None:
                remove_placement_group(group)
            ray.shutdown()

    def _wait_for_place(self, ray: Any, group: Any, bundle: Mapping[str, float]) -> bool:
        """Whether there is room by now, and the caller still wants it."""
        order, since = self._order, time.monotonic()
        while not group.wait(_PLACE_SECONDS):
            if not self._events.empty():
                return False
            nodes = _nodes(ray)
            possible = fits(bundle, order.nodes, order.strategy, nodes)
            when = "" if possible else ", ever"
            words = (
                f"{order.nodes} x ({_shown(bundle)}) cannot be placed by {order.strategy}{when}: "
                f"available are {_shown(ray.available_resources())}; the nodes have {'; '.join(map(_shown, nodes))}"
            )
            since = time.monotonic() if possible else since
            late = time.monotonic() - since > order.seconds
            self._tell("ended" if late else "queued", words)
            if late:
                return False
        return True

    def _run_agents(self, ray: Any, group: Any, bundle: Mapping[str, float]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - as in `_run`

        order = self._order
        task, running = ray.remote(run_agent), {}
        for index, argv in enumerate(order.agents):
            one = task.options(
                name=order.job,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={name: share for name, share in bundle.items() if name not in {"CPU", "GPU"}},
                max_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            reference = one.remote(argv, order.environ, order.any_python)
            reference.future().add_done_callback(lambda future, index=index: self._events.put((index, future)))
            running[index] = reference
        until: float | None = None
        while running:
            try:
                node, future = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if node is None:
                until = time.monotonic() + _END_SECONDS
                for reference in running.values():
                    ray.cancel(reference)
                continue
            del running[node]
            if words := _failure(future):
                self._tell("ended", f"node {node}: {words}")
        for reference in running.values():
            ray.cancel(reference, force=True)


def _knock(address: str) -> None:
    """Find out soon that nobody listens there, which Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _failure(future: Any) -> str:
    """How a task has failed, or ""."""
    if (error := future.exception()) is not None:
        return f"{type(error).__name__}: {str(error).strip()[-_TAIL_BYTES:]}"
    code, output = future.result()
    return f"its agent ended with {code}: {output}" if code else ""


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _shown(resources: Mapping[str, float]) -> str:
    """Resources as a person says them; memory, and the names that Ray makes for its own use, say nothing here."""
    inner = ("node:", "memory", "object_store_memory", "bundle_group_", "CPU_group_", "GPU_group_")
    counts = (f"{share:g} {name}" for name, share in sorted(resources.items()) if not name.startswith(inner))
    return ", ".join(counts) or "nothing"
