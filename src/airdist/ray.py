"""`ray_init` and `ray_launch`: Ray where there is none, for as long as it is needed.

    @ray_launch(num_accelerators=8)
    def tune(trials): ...             a Ray driver; Ray is there already, and has the 8 accelerators
    tune.distributed(64)[0]           what it returned

It is a launch like any other, so engine, environment, logs, tracking, time-out and ends are those of `distributed`.
What its ranks do is in `airdist.on_ray`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from airdist.decorator import DistributedFunction, distributed
from airdist.on_ray import TEMP_DIR, OnRay, checked_root, import_ray

if TYPE_CHECKING:
    from airdist.launch import Launch
    from airdist.results import Results
    from airdist.settings import Settings

__all__ = ["RayFunction", "ray_init", "ray_launch"]

P = ParamSpec("P")
R = TypeVar("R")

_START_SECONDS = 300.0


def ray_init(**options: Any) -> Any:
    """Join the Ray that runs on this machine or that `RAY_ADDRESS` names; where there is none, start one here.

    A Ray that was started ends with this process, however that ends; one that was joined is left as it was. Calling it
    again changes nothing.

    Args:
        options: for `ray.init`. `RAYTEMP_DIR`, where it is set, is where Ray keeps its files.

    Returns:
        What `ray.init` returns: the address and more, as a mapping that is also a context manager.

    Raises:
        LaunchError: when Ray is not installed, or its directory has too long a name.
        ConnectionError: when the Ray that is named does not answer.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray.init(ignore_reinit_error=True)
    if "://" not in str(options.get("address") or os.environ.get("RAY_ADDRESS") or ""):
        root = os.environ.get(TEMP_DIR)
        mine = {"include_dashboard": False} | ({"_temp_dir": checked_root(root)} if root else {})
        options = mine | options
    return ray.init(**options)


def ray_launch(*args: Any, **settings: Any) -> Any:
    """Make a function launchable as the driver of a Ray of its own: `@ray_launch(num_accelerators=8)`.

    `.distributed(...)` starts Ray on every node of the launch, calls the function once, on node 0, and ends Ray. The
    function does not call `ray.init`: it is connected already. `RANK`, `WORLD_SIZE` and their like are set neither in
    it nor in Ray's workers, since a driver is not a rank among others.

    Args:
        args: as for `airdist.distributed`.
        settings: as for `airdist.distributed`, except `isolate_devices`: Ray gives devices to its tasks.

    Returns:
        A `RayFunction`, or a decorator that makes one.

    Raises:
        TypeError: for a value of the wrong kind.
        ValueError: for a value out of range.
    """
    made: Any = distributed(*args, **settings)
    if isinstance(made, DistributedFunction):
        return RayFunction(made.__wrapped__, made.settings)

    def decorate(function: Callable[P, R]) -> RayFunction[P, R]:
        inner = made(function)
        return RayFunction(inner.__wrapped__, inner.settings)

    return decorate


class RayFunction(DistributedFunction[P, R]):
    """A function that is launched as a Ray driver. Made by `ray_launch`."""

    def __init__(self, function: Callable[P, R], settings: Settings) -> None:
        if settings.isolate_devices:
            raise ValueError("isolate_devices means nothing here: Ray shows each task the devices that it was given")
        super().__init__(function, settings)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> Results[R]:
        """Run the function once, as the driver of a Ray of all nodes of the launch, and wait.

        Returns:
            A list by rank: the function's value first, None for every other rank.

        Raises:
            LaunchError: when Ray does not start on all nodes.
            Exception: as for `airdist.DistributedFunction.distributed`.
        """
        return self._driver().distributed(*args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Start the same launch and return its handle at once."""
        return self._driver().submit(*args, **kwargs)

    def _driver(self) -> DistributedFunction[P, R]:
        # Whoever has the token may run code in that Ray, so each has another; it travels as part of the environment.
        environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        if TEMP_DIR in os.environ:
            environ[TEMP_DIR] = os.environ[TEMP_DIR]
        seconds = float(self.settings.engine_options.get("start_timeout") or _START_SECONDS)
        settings = self.settings.override({"env": {**environ, **self.settings.env}})
        return DistributedFunction(OnRay(self.__wrapped__, seconds), settings)
