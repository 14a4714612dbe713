"""When there is a world already: a rank of ours refuses to launch, a rank of torchrun's takes part.

Under torchrun, srun or anything else that sets `RANK` and `WORLD_SIZE`, every process runs the same program, so
`.distributed()` runs the function in place, once in each of them, and hands all of them the list by rank.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from airdist.environ import LAUNCH_MARK
from airdist.errors import LaunchError, NestedLaunchError
from airdist.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.settings import Settings

__all__ = ["outer_world", "run_attached"]


def outer_world(environ: Mapping[str, str], settings: Settings) -> tuple[int, int] | None:
    """Rank and world size given by an outer launcher, or None where a launch is free to start its own.

    Raises:
        NestedLaunchError: inside a rank of a launch of ours.
        LaunchError: when only one of the two is set, or they contradict what was asked for.
    """
    if LAUNCH_MARK in environ:
        raise NestedLaunchError(
            f"this is rank {environ.get('RANK')} of a launch already ({environ[LAUNCH_MARK]}): "
            "call the function itself here, without .distributed()"
        )
    found = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if environ.get(name)}
    if not found:
        return None
    if len(found) == 1:
        ((name, value),) = found.items()
        raise LaunchError(f"{name}={value} is set without the other of RANK and WORLD_SIZE: set both, or unset it")
    try:
        rank, world_size = int(found["RANK"]), int(found["WORLD_SIZE"])
    except ValueError:
        raise LaunchError(f"RANK={found['RANK']!r} and WORLD_SIZE={found['WORLD_SIZE']!r} are not numbers") from None
    asked = settings.num_accelerators
    if asked is not None and asked * settings.nodes != world_size:
        raise LaunchError(
            f"{asked * settings.nodes} processes are asked for, but RANK={rank} and WORLD_SIZE={world_size} say that "
            "this process belongs to a world of another size: unset both to launch from here, or ask for that many"
        )
    return rank, world_size


def run_attached(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int) -> Any:
    """Call the function in place, and return the values of all ranks if a process group is up afterwards.

    Without a group there is no way to the other ranks' values: the list then holds this rank's alone, labelled so.
    """
    value = function(*args, **kwargs)
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return Results([value], ranks=[rank])
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return Results(values)
