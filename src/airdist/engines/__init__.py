"""Engines by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from airdist.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.engines.base import Engine

__all__ = ["choose_engine"]

_ENGINES = {
    "local": "airdist.engines.local:LocalEngine",
    "ray": "airdist.engines.ray:RayEngine",
    "joined": "airdist.engines.joined:JoinedEngine",
    "slurm": "airdist.engines.slurm:SlurmEngine",
    "spark": "airdist.engines.spark:SparkEngine",
}


def choose_engine(name: str | None, *, remote: bool, environ: Mapping[str, str]) -> Engine:
    """The engine for a launch: the argument first, then `AIRDIST_ENGINE`, then the local one.

    Other machines, without a name, are those of the Ray cluster that `RAY_ADDRESS` names.

    Args:
        name: one of ours, or "module:Class" for another that follows `airdist.engines.base.Engine`.
        remote: whether other machines are asked for.
        environ: the caller's environment.

    Raises:
        LaunchError: for an engine that does not exist, or where other machines are asked for and none is named.
    """
    chosen = name or environ.get("AIRDIST_ENGINE") or ("ray" if remote and environ.get("RAY_ADDRESS") else None)
    if remote and chosen in {None, "", "local"}:
        raise LaunchError(
            "remote=True asks for other machines, and no engine that reaches them is configured: give engine= or set "
            f"AIRDIST_ENGINE ({', '.join(known for known in _ENGINES if known != 'local')}), set RAY_ADDRESS, or leave "
            "remote out to use the accelerators of this machine"
        )
    where = _ENGINES.get(chosen or "local", chosen or "")
    if ":" not in where:
        raise LaunchError(
            f'engine={chosen!r} does not exist; there is {", ".join(map(repr, _ENGINES))}, and "module:Class" for yours'
        )
    module, _, cls = where.partition(":")
    engine: Engine = getattr(import_module(module), cls)()
    return engine
