"""Engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airdist.engines.local import LocalEngine
from airdist.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.engines.base import Engine

__all__ = ["choose_engine"]


def choose_engine(name: str | None, *, nodes: int, remote: bool, environ: Mapping[str, str]) -> Engine:
    """The engine for a launch: the argument first, then `AIRDIST_ENGINE`, then the local one.

    Raises:
        LaunchError: for an engine that does not exist, or more nodes than the engine reaches.
    """
    chosen = name or environ.get("AIRDIST_ENGINE") or LocalEngine.name
    if chosen != LocalEngine.name:
        raise LaunchError(
            f"engine={chosen!r} does not exist; there is engine='local', the accelerators of this machine"
        )
    if nodes != 1:
        raise LaunchError(f"nodes={nodes}: engine='local' reaches this machine only; leave nodes at 1")
    if remote:
        raise LaunchError(
            "remote=True asks for other machines, and no engine that reaches them is configured; "
            "there is engine='local', the accelerators of this machine: leave remote out to use them"
        )
    return LocalEngine()
