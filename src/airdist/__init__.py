"""Run a training function on every accelerator: `@distributed`, then `train.distributed(...)`.

Names are resolved at their first use, so that importing this package imports neither torch nor MLflow nor Ray, and the
processes of a launch, which import its modules, start in milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airdist import runtime
    from airdist.decorator import DistributedFunction, distributed
    from airdist.devices import AcceleratorType, GPUType
    from airdist.errors import (
        AgentDiedError,
        AirdistError,
        DeviceError,
        DistributedTimeoutError,
        LaunchCancelledError,
        LaunchError,
        NestedLaunchError,
        NodeLostError,
        PayloadError,
        RankDiedError,
        RankError,
        RankExitError,
        ResultError,
    )
    from airdist.launch import Launch
    from airdist.results import Results

__all__ = [
    "AcceleratorType",
    "AgentDiedError",
    "AirdistError",
    "DeviceError",
    "DistributedFunction",
    "DistributedTimeoutError",
    "GPUType",
    "Launch",
    "LaunchCancelledError",
    "LaunchError",
    "NestedLaunchError",
    "NodeLostError",
    "PayloadError",
    "RankDiedError",
    "RankError",
    "RankExitError",
    "ResultError",
    "Results",
    "distributed",
    "runtime",
]

_ELSEWHERE = {
    "AcceleratorType": "devices",
    "DistributedFunction": "decorator",
    "GPUType": "devices",
    "Launch": "launch",
    "Results": "results",
    "distributed": "decorator",
}


def __getattr__(name: str) -> Any:
    if name == "runtime":
        return import_module("airdist.runtime")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"airdist.{_ELSEWHERE.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
