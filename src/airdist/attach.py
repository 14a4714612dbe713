"""When there is a world already: a rank of ours refuses to launch, one that somebody else has started takes part.

    RANK, WORLD_SIZE                       torchrun, Accelerate, a JobSet of ranks   this process is a rank
    a step of srun, several tasks a node   srun                                      this process is a rank
    a step of srun, one task for each node srun                                      this process is a node
    NUM_NODES, NODE_RANK, MASTER_ADDR      a JobSet of nodes, any allocation         this process is a node

Every process runs the same program. A rank calls the function in place; a node starts its ranks by an agent like any
other launch (`airdist.engines.joined`). Either way all of them get the list by rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airdist.environ import LAUNCH_MARK
from airdist.errors import LaunchError, NestedLaunchError
from airdist.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from airdist.settings import Settings

__all__ = ["NodeWorld", "RankWorld", "node_world", "outer_world", "run_attached"]

_PORT = 29400
# A port that steps at the same time are unlikely to share, below those that systems choose for clients.
_STEP_PORTS = (15000, 15000)


@dataclass(frozen=True)
class RankWorld:
    """This process is a rank.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        environ: variables of torchrun's contract that the outer launcher has not set itself.
    """

    rank: int
    world_size: int
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeWorld:
    """This process stands for a node.

    Attributes:
        node: rank of the node.
        nodes: number of nodes.
        address: host of node 0.
        port: where the process on node 0 listens.
    """

    node: int
    nodes: int
    address: str
    port: int


def outer_world(environ: Mapping[str, str], settings: Settings) -> RankWorld | NodeWorld | None:
    """What an outer launcher has made of this process, or None where a launch is free to start its own.

    Raises:
        NestedLaunchError: inside a rank of a launch of ours.
        LaunchError: when the variables are incomplete, or contradict what was asked for.
    """
    if LAUNCH_MARK in environ:
        raise NestedLaunchError(
            f"this is rank {environ.get('RANK')} of a launch already ({environ[LAUNCH_MARK]}): "
            "call the function itself here, without .distributed()"
        )
    world: RankWorld | NodeWorld | None = _torchrun_world(environ)
    if world is None and settings.engine is None and not environ.get("AIRDIST_ENGINE"):
        world = node_world(environ) or _step_world(environ)
    asked = settings.num_accelerators
    if isinstance(world, RankWorld) and asked is not None and asked * settings.nodes != world.world_size:
        raise LaunchError(
            f"{asked * settings.nodes} processes are asked for, but this one belongs to a world of another size "
            f"(RANK={world.rank}, WORLD_SIZE={world.world_size}): leave num_accelerators out, or ask for that many"
        )
    if isinstance(world, NodeWorld) and settings.nodes not in {1, world.nodes}:
        raise LaunchError(f"nodes={settings.nodes}, but this process is one of {world.nodes} nodes")
    return world


def node_world(environ: Mapping[str, str]) -> NodeWorld | None:
    """The nodes that the environment describes, if this process stands for one of several."""
    names = ("NUM_NODES", "NODE_RANK", "MASTER_ADDR")
    found = {name: environ[name] for name in names if environ.get(name)}
    if found.get("NUM_NODES", "1") != "1":
        if missing := [name for name in names if name not in found]:
            raise LaunchError(f"NUM_NODES={found['NUM_NODES']} is set without {' and '.join(missing)}")
        node, nodes = _numbers(found, "NODE_RANK", "NUM_NODES")
        return NodeWorld(node, nodes, found["MASTER_ADDR"], int(environ.get("MASTER_PORT") or _PORT))
    step = _step(environ)
    if step is None or step["tasks"] != step["nodes"]:
        return None
    return NodeWorld(step["task"], step["nodes"], _first_host(environ), _step_port(environ))


def run_attached(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], world: RankWorld, settings: Settings
) -> Any:
    """Call the function in place, and return the values of all ranks if a process group is up afterwards.

    Without a group there is no way to the other ranks' values: the list then holds this rank's alone, labelled so.
    """
    with _environment(world.environ), _tracked(function, world, settings):
        value = function(*args, **kwargs)
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return Results([value], ranks=[world.rank])
        values: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(values, value)
        return Results(values)


def _tracked(
    function: Callable[..., Any], world: RankWorld, settings: Settings
) -> contextlib.AbstractContextManager[None]:
    if not settings.tracking:
        return contextlib.nullcontext()
    from airdist.tracking.attached import tracked  # noqa: PLC0415 - not needed without tracking

    name = settings.name or str(getattr(function, "__name__", type(function).__name__))
    params = settings.changed() | {"processes": world.world_size}
    return tracked(name, params, rank=world.rank, world_size=world.world_size)


def _torchrun_world(environ: Mapping[str, str]) -> RankWorld | None:
    found = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if environ.get(name)}
    if not found:
        return None
    if len(found) == 1:
        ((name, value),) = found.items()
        raise LaunchError(f"{name}={value} is set without the other of RANK and WORLD_SIZE: set both, or unset it")
    rank, world_size = _numbers(found, "RANK", "WORLD_SIZE")
    return RankWorld(rank, world_size)


def _step_world(environ: Mapping[str, str]) -> RankWorld | None:
    """The tasks of an `srun` that starts ranks; a batch script, an interactive shell or one task is no rank."""
    step = _step(environ)
    if step is None:
        return None
    per_node = step["tasks"] // step["nodes"]
    values = {
        "RANK": step["task"],
        "WORLD_SIZE": step["tasks"],
        "LOCAL_RANK": int(environ.get("SLURM_LOCALID", step["task"] % per_node)),
        "LOCAL_WORLD_SIZE": per_node,
        "NODE_RANK": int(environ.get("SLURM_NODEID", step["task"] // per_node)),
        "MASTER_ADDR": _first_host(environ),
        "MASTER_PORT": _step_port(environ),
    }
    return RankWorld(step["task"], step["tasks"], {name: str(value) for name, value in values.items()})


def _step(environ: Mapping[str, str]) -> dict[str, int] | None:
    names = {"task": "SLURM_PROCID", "tasks": "SLURM_STEP_NUM_TASKS", "nodes": "SLURM_STEP_NUM_NODES"}
    if any(not environ.get(name, "").isdigit() for name in names.values()):
        return None
    step = {key: int(environ[name]) for key, name in names.items()}
    return step if step["tasks"] > 1 else None


def _first_host(environ: Mapping[str, str]) -> str:
    """Where node 0 is: what the user says, or the first of a list such as `gpu[07-09,12],login`."""
    if chosen := environ.get("MASTER_ADDR"):
        return chosen
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environ.get("SLURM_STEP_NODELIST", ""))
    return "".join(filter(None, first.groups())) if first else "127.0.0.1"


def _step_port(environ: Mapping[str, str]) -> int:
    if chosen := environ.get("MASTER_PORT"):
        return int(chosen)
    first, count = _STEP_PORTS
    return first + (int(environ.get("SLURM_JOB_ID", 0)) * 31 + int(environ.get("SLURM_STEP_ID", 0))) % count


def _numbers(found: Mapping[str, str], *names: str) -> tuple[int, int]:
    try:
        first, second = (int(found[name]) for name in names)
    except ValueError:
        raise LaunchError(f"{' and '.join(f'{name}={found[name]!r}' for name in names)} are not numbers") from None
    return first, second


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Give this process, which is a rank, what torchrun would have given it, for as long as it is one."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
