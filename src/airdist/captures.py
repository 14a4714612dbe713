"""What a function takes along when it is pickled, by name: for telling which part will not go, or weighs too much.

Used only after something went wrong or turned out large, so it may pickle the parts again one by one.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["captures", "largest", "size", "unpicklable", "unpicklable_part"]

_DEPTH = 8


def captures(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of everything that travels with a function by value: closure, globals, defaults."""
    function = inspect.unwrap(function)
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        yield from ((f"attribute {name!r}", value) for name, value in getattr(function, "__dict__", {}).items())
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"closure variable {name!r}", cell.cell_contents) for name, cell in cells if _assigned(cell))
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield f"global {name!r}", function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default value {index}", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default of {name!r}", value


def unpicklable(parts: Iterable[tuple[str, Any]]) -> str | None:
    """The path to the innermost part that will not pickle, such as "closure variable 'lock' (type _thread.lock)"."""
    return next(filter(None, (unpicklable_part(name, value) for name, value in parts)), None)


def unpicklable_part(name: str, value: Any, depth: int = _DEPTH, seen: frozenset[int] = frozenset()) -> str | None:
    """The path below `value` to the part that will not pickle, or None if it all does."""
    if id(value) in seen or size(value) is not None:
        return None
    if depth:
        for inner_name, inner in _inside(value):
            if found := unpicklable_part(f"{name} -> {inner_name}", inner, depth - 1, seen | {id(value)}):
                return found
    kind = type(value)
    qualified = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} (type {qualified})"


def largest(parts: Iterable[tuple[str, Any]], count: int = 5) -> list[tuple[str, int]]:
    """Names and sizes in bytes of the largest parts, largest first."""
    weighed = [(name, size(value) or 0) for name, value in parts]
    return sorted(weighed, key=lambda part: -part[1])[:count]


def size(value: Any) -> int | None:
    """Bytes that a value takes pickled, or None if it cannot be."""
    import cloudpickle  # noqa: PLC0415 - only needed after something went wrong

    try:
        return len(cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001 - any failure to pickle is the answer
        return None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("an element", item) for item in value)
    elif isinstance(value, (types.FunctionType, types.MethodType)):
        yield from captures(value)
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items() if not name.startswith("__"))
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _assigned(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that is assigned later in the enclosing function
        return False
    return True
