"""`distributed`: a function that can still be called, and can be launched.

    @distributed(num_accelerators=2)
    def train(epochs): ...

    train(1)                        an ordinary call, here
    train.distributed(1)            on two accelerators; a list of return values, by rank
    train.submit(1)                 the same in the background; a handle

The decorator stores settings and a reference to the function, nothing else. Devices, environment variables, the engine
and MLflow are looked at when the launch is made.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from airdist.attach import RankWorld, outer_world, run_attached
from airdist.errors import LaunchError
from airdist.settings import Settings
from airdist.start import start_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.devices import AcceleratorType, GPUType
    from airdist.launch import Launch
    from airdist.logs import LogMode
    from airdist.results import Results

__all__ = ["DistributedFunction", "distributed"]

P = ParamSpec("P")
R = TypeVar("R")

_THREE_HOURS = 3 * 3600


class DistributedFunction(Generic[P, R]):
    """A function with its launch settings. Made by `distributed`.

    Attributes:
        settings: how `.distributed()` and `.submit()` launch it.
    """

    __wrapped__: Callable[P, R]
    __qualname__: str

    def __init__(self, function: Callable[P, R], settings: Settings) -> None:
        functools.update_wrapper(self, function)
        self.settings = settings

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in this process."""
        return self.__wrapped__(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> Results[R]:
        """Run the function on every accelerator, show its output, and wait.

        Every rank gets the same arguments. Where an outer launcher has started the processes already (torchrun, srun, a
        JobSet), this one takes part in that world, as a rank or as a node of it.

        Returns:
            The return values, a list by rank.

        Raises:
            DeviceError: when the accelerators asked for are not there.
            PayloadError: when the function, what it captures or an argument cannot be pickled, with its name.
            NestedLaunchError: inside a rank of a launch.
            DistributedTimeoutError: when `timeout` has passed, with the stacks of all ranks.
            RankDiedError: when a rank was killed or crashed.
            Exception: the original exception of the rank that failed first; its traceback there is its `__cause__`.
        """
        self._check_arguments(args, kwargs)
        world, settings = outer_world(os.environ, self.settings), self.settings
        results: Results[R]
        if isinstance(world, RankWorld):
            results = run_attached(self.__wrapped__, args, kwargs, world, settings)
            return results
        if world is not None:
            from airdist.engines.joined import take_part  # noqa: PLC0415 - as above

            if world.node > 0:
                results = take_part(world, settings)
                return results
            settings = settings.override({"engine": "joined", "nodes": world.nodes})
        return start_launch(self.__wrapped__, args, kwargs, settings, display=True).watch()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Start the same launch and return its handle at once: `result()`, `cancel()`, `logs(rank)`, or `await` it.

        Raises:
            LaunchError: in a process that an outer launcher has started as a rank or a node: there is nothing to start.
        """
        self._check_arguments(args, kwargs)
        if outer_world(os.environ, self.settings) is not None:
            raise LaunchError(
                "an outer launcher has started this process as a rank or a node; use .distributed() to take part"
            )
        return start_launch(self.__wrapped__, args, kwargs, self.settings, display=False)

    def with_overrides(self, **settings: Any) -> DistributedFunction[P, R]:
        """The same function with some settings changed; this one stays as it is."""
        return type(self)(self.__wrapped__, self.settings.override(settings))

    def __get__(self, instance: object, owner: type | None = None) -> DistributedFunction[..., R]:
        """A method, bound to its object, which travels to the ranks with it."""
        if instance is None:
            return self
        return type(self)(types.MethodType(self.__wrapped__, instance), self.settings)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """As its name where the importer would find this object under it, like a function; else by value."""
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        name: str = self.__qualname__
        if found is self and self.__module__ != "__main__":
            return name
        return type(self), (self.__wrapped__, self.settings)

    def __repr__(self) -> str:
        """The signature, the settings that differ from the defaults, and how to use it."""
        name = self.__qualname__
        shown = ", ".join(f"{key}={value!r}" for key, value in self.settings.changed().items())
        try:
            signature = str(inspect.signature(self.__wrapped__))
        except (TypeError, ValueError):
            signature = "(...)"
        return (
            f"<@distributed({shown}) {name}{signature}: {name}.distributed(...) launches it, {name}(...) calls it here>"
        )

    def _check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            signature = inspect.signature(self.__wrapped__)
        except (TypeError, ValueError):  # some builtins have none
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__qualname__}{signature}: {error}") from None


@overload
def distributed(num_accelerators: Callable[P, R], /) -> DistributedFunction[P, R]: ...


@overload
def distributed(
    num_accelerators: int | None = None,
    accelerator_type: AcceleratorType | GPUType | str | None = None,
    timeout: float | None = _THREE_HOURS,
    *,
    engine: str | None = None,
    nodes: int = 1,
    engine_options: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    logs: LogMode = "default",
    grace_seconds: float | None = None,
    tracking: bool = True,
    isolate_devices: bool = False,
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...


def distributed(
    num_accelerators: Callable[P, R] | int | None = None,
    accelerator_type: AcceleratorType | GPUType | str | None = None,
    timeout: float | None = _THREE_HOURS,
    *,
    engine: str | None = None,
    nodes: int = 1,
    engine_options: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    logs: LogMode = "default",
    grace_seconds: float | None = None,
    tracking: bool = True,
    isolate_devices: bool = False,
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
) -> DistributedFunction[P, R] | Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Make a function launchable on every accelerator: `@distributed`, or `@distributed(num_accelerators=2)`.

    Args:
        num_accelerators: processes on each node, one for each accelerator. By default every visible accelerator;
            without any, one CPU process. Without any, a number asks for that many CPU processes.
        accelerator_type: what must be attached, such as `AcceleratorType.GPU_8xH100`; by default anything.
        timeout: seconds that a launch may take, over all its attempts; None: no limit.
        engine: what starts the ranks; by default `AIRDIST_ENGINE`, else "local", this machine.
        nodes: machines, each with `num_accelerators`.
        engine_options: what the engine wants to know, such as `{"partition": "gpu", "time": "4:00:00"}` for Slurm. All
            engines of several machines have `start_timeout` (seconds for the nodes to come together, 300), `heartbeat`
            (seconds of silence after which a node counts as lost, 30), `queue_timeout` (86,400) and `python`.
        max_restarts: how often all ranks are started again after one of them failed.
        env: variables for the ranks, besides the caller's environment at the time of the call.
        name: name of the run; by default the function's.
        logs: what is displayed: "default" (rank 0, and standard error of the others), "all", "rank0" or "none". The
            files in the run directory are always complete.
        grace_seconds: between asking ranks to end (SIGTERM) and ending them; by default 10, and 2 after a rank's
            failure, whose peers are mostly stuck in a collective.
        tracking: whether the launch is an MLflow run.
        isolate_devices: let each rank see its own accelerator only. By default ranks share the list and choose by
            `LOCAL_RANK`, as NCCL prefers.
        gpus: old name of `num_accelerators`.
        gpu_type: old name of `accelerator_type`.
        remote: old way to ask for accelerators of other machines; needs an engine that reaches them.

    Returns:
        A `DistributedFunction`, or a decorator that makes one.

    Raises:
        TypeError: for a value of the wrong kind, or a function that is a coroutine or a generator.
        ValueError: for a value out of range, or an old name together with the new one.
    """
    count = None if callable(num_accelerators) else num_accelerators
    old = {"gpus": gpus, "gpu_type": gpu_type, "remote": remote or None}
    new = {"gpus": "num_accelerators", "gpu_type": "accelerator_type", "remote": "engine"}
    for old_name in (given for given, value in old.items() if value is not None):
        warnings.warn(f"{old_name} is the old name; use {new[old_name]}", FutureWarning, stacklevel=2)
    if gpus is not None and count is not None:
        raise ValueError(f"gpus={gpus} and num_accelerators={count} are the same thing; give num_accelerators alone")
    if gpu_type is not None and accelerator_type is not None:
        raise ValueError("gpu_type and accelerator_type are the same thing; give accelerator_type alone")
    settings = Settings(
        num_accelerators=gpus if count is None else count,
        accelerator_type=gpu_type if accelerator_type is None else accelerator_type,
        timeout=timeout,
        engine=engine,
        nodes=nodes,
        engine_options=engine_options or {},
        max_restarts=max_restarts,
        env=env or {},
        name=name,
        logs=logs,
        grace_seconds=grace_seconds,
        tracking=tracking,
        isolate_devices=isolate_devices,
        remote=remote,
    )

    def decorate(function: Callable[P, R]) -> DistributedFunction[P, R]:
        if not callable(function):
            raise TypeError(f"@distributed goes around a function, not around {function!r}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{function.__qualname__} is a coroutine or generator function; a rank returns one value")
        return DistributedFunction(function, settings)

    return decorate(num_accelerators) if callable(num_accelerators) else decorate
