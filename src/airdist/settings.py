"""How a function is to be launched: the arguments of `distributed`, checked as far as they can be at decoration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from airdist.devices import AcceleratorType, GPUType, check_accelerator_type
from airdist.logs import LOG_MODES, LogMode

__all__ = ["Settings"]

_HIDDEN = frozenset({"env", "engine_options"})


@dataclass(frozen=True)
class Settings:
    """Everything about a launch but the function and its arguments; see `airdist.distributed` for their meaning.

    Raises:
        TypeError: for a value of the wrong kind.
        ValueError: for a value out of range.
    """

    num_accelerators: int | None = None
    accelerator_type: AcceleratorType | GPUType | str | None = None
    timeout: float | None = 3 * 3600
    engine: str | None = None
    nodes: int = 1
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    logs: LogMode = "default"
    grace_seconds: float | None = None
    tracking: bool = True
    isolate_devices: bool = False
    remote: bool = False

    def __post_init__(self) -> None:
        if self.num_accelerators is not None:
            _whole("num_accelerators", self.num_accelerators, least=1)
        _whole("nodes", self.nodes, least=1)
        _whole("max_restarts", self.max_restarts, least=0)
        _seconds("timeout", self.timeout, zero=False)
        _seconds("grace_seconds", self.grace_seconds, zero=True)
        check_accelerator_type(self.accelerator_type)
        if self.logs not in LOG_MODES:
            raise ValueError(f"logs={self.logs!r}: it is one of {', '.join(map(repr, LOG_MODES))}")
        if not isinstance(self.env, Mapping):
            raise TypeError(f"env={self.env!r}: it is a mapping of variable names to values")
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, (str, os.PathLike)):
                raise TypeError(f"env: {name!r} has a value of type {type(value).__name__}; write it as a string")
        if not isinstance(self.engine_options, Mapping):
            raise TypeError(f"engine_options={self.engine_options!r}: it is a mapping of names to values")
        for name in ("start_timeout", "queue_timeout", "heartbeat"):
            _seconds(f"engine_options[{name!r}]", self.engine_options.get(name), zero=False)
        # A copy, so that a launch is not changed by what the caller does to its dictionary afterwards.
        object.__setattr__(self, "env", {name: os.fspath(value) for name, value in self.env.items()})
        object.__setattr__(self, "engine_options", dict(self.engine_options))

    def override(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with some changed.

        Raises:
            TypeError: for a name that is not a setting.
        """
        known = [setting.name for setting in fields(self)]
        if unknown := sorted(set(changes) - set(known)):
            raise TypeError(f"no such setting: {', '.join(unknown)}; there are {', '.join(known)}")
        return replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults, by name; of mappings the names only, since values may be secrets."""
        usual = Settings()
        shown = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        shown = {name: value for name, value in shown.items() if value != getattr(usual, name)}
        return {name: sorted(value) if name in _HIDDEN else value for name, value in shown.items()}


def _whole(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: it is a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: the least is {least}")


def _seconds(name: str, value: Any, *, zero: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: it is a number of seconds, or None")
    if not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name}={value}: it is a {'' if zero else 'positive '}number of seconds, or None")
