"""The names of `databricks.air` and `serverless_gpu`, so that code written for the platform runs unchanged elsewhere.

`from airdist.compat import distributed, GPUType, UCVolumeDataset` gives every documented name. `install()` goes
further: it registers modules of the documented names, unless the real ones are importable, so that a notebook's own
`from databricks.air import distributed` works. Nothing is loaded before it is used: `airdata`, and torch with it, is
imported for the first data name that is asked for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from airdist import runtime

__all__ = ["INSTALLED", "install"]

INSTALLED = "AIRDIST_COMPAT"
"""Set in the environment by `install`: the ranks of a launch install the names before they load the function."""

_LAUNCH = {
    "distributed": "airdist.decorator:distributed",
    "AcceleratorType": "airdist.devices:AcceleratorType",
    "GPUType": "airdist.devices:GPUType",
    "runtime": "airdist.runtime",
    "ray_init": "airdist.ray:ray_init",
    "ray_launch": "airdist.ray:ray_launch",
}
_DATA = {
    name: f"airdata:{name}"
    for name in ("UCVolumeDataset", "DataLoader", "Checkpointable", "UCVolumeWriter", "UCVolumeReader", "UCDataset")
}
# `launcher` and `compute` appear in published notebooks of the older package.
_MODULES = {
    "databricks.air": _LAUNCH,
    "databricks.air.data": _DATA,
    "serverless_gpu": _LAUNCH,
    "serverless_gpu.compute": {"GPUType": _LAUNCH["GPUType"]},
    "serverless_gpu.data": _DATA,
    "serverless_gpu.launcher": {"distributed": _LAUNCH["distributed"]},
    "serverless_gpu.ray": {name: _LAUNCH[name] for name in ("ray_init", "ray_launch")},
}


def install() -> tuple[str, ...]:
    """Make `import databricks.air` and `import serverless_gpu` work in this process and in the ranks it launches.

    The real packages win: a name that can be imported without this is left alone, with all its submodules, and a real
    `databricks` package (as of `databricks-sdk`) keeps everything it has. Calling it again changes nothing.

    Returns:
        The names of the modules that are ours now, in order.
    """
    for package in ("databricks.air", "serverless_gpu"):
        if not _importable(package):
            for name in sorted(_MODULES):
                if name == package or name.startswith(f"{package}."):
                    _register(name, _AliasModule(name, _MODULES[name]))
            # The module itself, under its own name, so that a function that refers to it can be pickled.
            _register(f"{package}.runtime", runtime)
    ours = tuple(sorted(name for name, module in list(sys.modules.items()) if _is_ours(name, module)))
    if ours:
        os.environ[INSTALLED] = "1"
    return ours


class _AliasModule(ModuleType):
    """A module whose names are found elsewhere, each at its first use."""

    def __init__(self, name: str, names: dict[str, str]) -> None:
        super().__init__(name, f"The documented names of `{name}`, provided by airdist and airdata.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__path__: list[str] = []
        self.__all__ = sorted(names)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        value = _resolve(self.__name__, self._names, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})


def _importable(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _is_ours(name: str, module: ModuleType) -> bool:
    return isinstance(module, _AliasModule) or (module is runtime and name != runtime.__name__)


def _register(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    if parent and not _importable(parent):
        _register(parent, _AliasModule(parent, {}))
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)


def _resolve(module: str, names: dict[str, str], name: str) -> Any:
    target = names.get(name)
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    source, _, attribute = target.partition(":")
    found = importlib.import_module(source)
    try:
        return getattr(found, attribute) if attribute else found
    except AttributeError:
        # Not an AttributeError: `from ... import` would replace its message by a bare "cannot import name".
        raise ImportError(f"{name} is documented for {module}, but {source} does not provide it yet.") from None


def __getattr__(name: str) -> Any:
    return _resolve(__name__, {**_LAUNCH, **_DATA}, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAUNCH, *_DATA})
