"""Which software a process has, and where two machines differ."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["differences", "versions_here"]

_ALWAYS = ("torch", "numpy", "cloudpickle", "airdata", "mlflow", "pyarrow")


def versions_here(names: Iterable[str] | None = None) -> dict[str, str]:
    """Versions by name of distribution, and that of Python.

    Args:
        names: which; by default those that a launch needs and those whose modules this process has imported.
    """
    if names is None:
        loaded = {name.partition(".")[0] for name in list(sys.modules)} - sys.stdlib_module_names
        names = {*_ALWAYS, *(name for name in loaded if not name.startswith("_"))}
    found = {name: _version(name) for name in sorted(set(names) - {"python"})}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):
        return ""


def differences(caller: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is not the same: by name, the caller's version and the one here ("none")."""
    return {
        name: (version, here.get(name, "none"))
        for name, version in caller.items()
        if here.get(name) != version and not (name == "airdata" and name not in here)
    }
