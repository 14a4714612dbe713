"""The caller's `__main__`, in processes that have another one: ranks, and the worker processes that ranks start.

What a script or a notebook defines travels to a rank by value and is called `__main__.Dataset` there too. Plain pickle
writes no more than that name: `torch.save`, and `multiprocessing`, which sends a loader's dataset to workers that are
not forked ("spawn", and "forkserver", the default from Python 3.14 on). So the definitions are put where the name says:

    caller ── payload: definitions, call ──> rank: `adopt` ── multiprocessing ──> worker: runs this module as its main

`multiprocessing` has its children run the parent's main module again, under the name `__mp_main__`, if that module says
by `__spec__` what it is called. A rank says that it is this module; it reads the definitions from the payload, and
nothing of the user's script is executed again.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["adopt", "definition"]

_NAME = "airdist.caller_main"  # `__name__` is another one where this runs as a main module


def definition(value: Any) -> tuple[str, Any] | None:
    """Name and value of the class or function of `__main__` by which plain pickle would find `value`, if it would.

    For a nested class it is the outermost one around it.
    """
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ != "__main__":
        return None
    outermost, *path = value.__qualname__.split(".")
    found = root = vars(sys.modules["__main__"]).get(outermost)
    for part in path:
        found = getattr(found, part, None)
    return (outermost, root) if found is value else None


def adopt(definitions: Mapping[str, Any]) -> None:
    """Put definitions of the caller's `__main__` into this process's, for its worker processes too."""
    main = sys.modules["__main__"]
    # The program of a rank has names of its own, which may give way (a function is often called `main`), and the
    # interpreter's, which may not.
    kept = {name for name in vars(main) if name.startswith("__")}
    vars(main).update({name: value for name, value in definitions.items() if name not in kept})
    for value in definitions.values():
        _name_nested(value)
    if definitions and main.__spec__ is None:
        main.__spec__ = ModuleSpec(_NAME, None)


def _name_nested(outer: Any) -> None:
    """Give classes inside of a class their full name, of which cloudpickle keeps the last part only."""
    if isinstance(outer, type) and outer.__module__ == "__main__":
        for name, inner in vars(outer).items():
            if isinstance(inner, type) and inner.__module__ == "__main__" and inner.__qualname__ == name:
                inner.__qualname__ = f"{outer.__qualname__}.{name}"
                _name_nested(inner)


if __name__ == "__mp_main__":
    from pathlib import Path

    from airdist.environ import LAUNCH_MARK
    from airdist.payload import read_definitions
    from airdist.rundir import RunDirectory

    _definitions = read_definitions(RunDirectory(Path(os.environ[LAUNCH_MARK])).payload)
    for _value in _definitions.values():
        _name_nested(_value)
    globals().update(_definitions)
