"""The documented Ray entry points, `ray_init` and `ray_launch`: their names are here, a Ray cluster is not yet.

Each says so when it is used, at the line that uses it, rather than at the import of a notebook's first cell.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ray_init", "ray_launch"]

_TODAY = (
    "is not implemented yet. Today `airdist.distributed` runs a function on every accelerator of one node; a function "
    "that needs Ray on that node can call `ray.init()` itself, with no decorator."
)


def ray_init(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Would start Ray on this node, or join the one that runs.

    Raises:
        NotImplementedError: Always, with what exists today.
    """
    raise NotImplementedError(f"airdist.ray.ray_init {_TODAY}")


def ray_launch(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Would run a function once, as the driver of a Ray cluster over the launch's nodes.

    Raises:
        NotImplementedError: Always, with what exists today.
    """
    raise NotImplementedError(f"airdist.ray.ray_launch {_TODAY}")
