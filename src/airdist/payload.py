"""A function and its arguments, as bytes that every rank can run, and a useful answer when they will not go.

A payload is three pickles in a row: a `Context` (plain values: where the ranks look for modules) and, once that is
entered, the definitions of the caller's `__main__` that plain pickle will ask for, and a `Call`. What lies in
`__main__` (a script, a notebook) or in a module that a fresh interpreter would not find travels by value, so nothing of
the user's is executed twice. A function of an importable module travels as its name, so module-level locks and handles
are no obstacle.
"""

from __future__ import annotations

import importlib
import io
import linecache
import pickle
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, BinaryIO

from airdist.caller_main import definition
from airdist.captures import captures, largest, unpicklable
from airdist.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Call", "Context", "pack", "read", "read_definitions"]

WARN_BYTES = 10 << 20
"""From here on every rank spends noticeable time on its copy."""
LIMIT_BYTES = 1 << 30
"""More is nearly always data that the function should load itself."""

_registering = threading.Lock()


@dataclass(frozen=True)
class Context:
    """What a rank takes over from its caller before it can unpickle anything of the user's.

    Attributes:
        path: `sys.path`, absolute.
        argv: `sys.argv`, for functions that look at it.
        sources: lines of code that no file holds (the cells of a notebook), so that tracebacks can show them.
    """

    path: tuple[str, ...]
    argv: tuple[str, ...]
    sources: Mapping[str, list[str]]

    @classmethod
    def of_this_process(cls) -> Context:
        """The context of the caller."""
        # An entry without a time of modification is one that linecache did not read from a file.
        cells = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
        return cls(tuple(str(Path(entry).absolute()) for entry in sys.path), tuple(sys.argv), cells)

    def enter(self) -> None:
        """Make this process look for modules where the caller does."""
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        self.show_sources()

    def show_sources(self) -> None:
        """Let tracebacks of this process show lines that no file holds."""
        for name, lines in self.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


@dataclass(frozen=True)
class Call:
    """A function, by value or as a name, and what to call it with."""

    function: Callable[..., Any] | Name
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Call the function."""
        function = self.function.resolve() if isinstance(self.function, Name) else self.function
        return function(*self.args, **self.kwargs)

    def main_globals(self) -> Mapping[str, Any]:
        """The globals of the caller's `__main__` that came along with the function."""
        found: dict[str, Any] = getattr(self.function, "__globals__", {})
        return found if found.get("__name__") == "__main__" else {}


@dataclass(frozen=True)
class Name:
    """Where an importable function is found."""

    module: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Name | None:
        """The name of `function` or of the decorator's object around it, or None where a rank would not find it."""
        module = getattr(function, "__module__", None) or "__main__"
        name = cls(module, getattr(function, "__qualname__", "<locals>"))
        if module == "__main__" or not importable(module):
            return None
        try:
            found = name._lookup(sys.modules[module])
        except AttributeError:
            return None
        return name if function is found or function is getattr(found, "__wrapped__", None) else None

    def resolve(self) -> Callable[..., Any]:
        """The function, without the decorator's object around it."""
        found = self._lookup(importlib.import_module(self.module))
        function: Callable[..., Any] = found.__wrapped__ if hasattr(found, "distributed") else found
        return function

    def _lookup(self, module: ModuleType) -> Any:
        found: Any = module
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Serialise a call for the ranks.

    Raises:
        PayloadError: when something will not pickle, named with its path from the function, or when the whole exceeds
            1 GiB, with its largest parts. More than 10 MiB warns.
    """
    name = Name.of(function)
    call = Call(name or function, args, kwargs)
    parts = [
        *(captures(function) if name is None else ()),
        *((f"argument {index}", value) for index, value in enumerate(args)),
        *((f"argument {key!r}", value) for key, value in kwargs.items()),
    ]
    with _by_value(function):
        try:
            body = _dumps(call)
        except Exception as error:
            raise PayloadError(_explain(function, parts, error)) from error
        if len(body) > WARN_BYTES:
            _weigh(function, parts, len(body))
    return pickle.dumps(Context.of_this_process(), protocol=5) + body


def importable(module: str) -> bool:
    """Whether a fresh interpreter with this `sys.path` would import the very file that `module` was loaded from."""
    path = spec = None
    parts = module.split(".")
    for end in range(len(parts)):
        spec = _find(".".join(parts[: end + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if spec is None or spec.origin is None or not spec.has_location or loaded is None:
        return spec is not None
    return Path(spec.origin).resolve() == Path(loaded).resolve()


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec that the importer would find afresh; `importlib.util.find_spec` answers from `sys.modules`."""
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next(filter(None, (find(name, path, None) for find in finders if find)), None)


def read(file: BinaryIO) -> tuple[Mapping[str, Any], Call]:
    """The definitions and the call, from a payload whose context has been read and entered."""
    unpickler = pickle.Unpickler(file)  # noqa: S301 - written by this user's own launch, mode 0700
    return unpickler.load(), unpickler.load()


def read_definitions(path: Path) -> Mapping[str, Any]:
    """The definitions of the caller's `__main__`, without the call and its arguments, which may be large."""
    with path.open("rb") as file:
        context: Context = pickle.load(file)  # noqa: S301 - as above
        context.show_sources()
        definitions: Mapping[str, Any] = pickle.load(file)  # noqa: S301 - as above
    return definitions


def _dumps(call: Call) -> bytes:
    """Pickle the definitions that a call involves and, after them, the call, as two loads of one unpickler.

    The first pass finds the definitions and writes nothing: what comes first in the file is known last.
    """
    import cloudpickle  # noqa: PLC0415 - 40 ms that an import of this package need not take

    definitions: dict[str, Any] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        """Notes definitions, and keeps the file names of code objects.

        cloudpickle replaces them (for payloads that do not depend on where they were made); then neither a traceback
        nor `inspect.getsource`, which Triton's compiler uses, finds the source.
        """

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                constructor, values = cloudpickle.Pickler.dispatch_table[CodeType](obj)
                return _code, (obj.co_filename, constructor, values)
            if found := definition(obj):
                definitions.setdefault(*found)
            return super().reducer_override(obj)

    Pickler(_Nowhere(), protocol=5).dump(call)
    with io.BytesIO() as file:
        pickler = Pickler(file, protocol=5)
        pickler.dump(dict(definitions))
        pickler.dump(call)
        return file.getvalue()


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def _code(filename: str, constructor: Callable[..., CodeType], values: tuple[Any, ...]) -> CodeType:
    return constructor(*values).replace(co_filename=filename)


@contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Let everything of the function's module travel by value if ranks could not import that module."""
    import cloudpickle  # noqa: PLC0415 - as above

    name = getattr(function, "__module__", None) or "__main__"
    module = sys.modules.get(name)
    if module is None or name == "__main__" or name in cloudpickle.list_registry_pickle_by_value() or importable(name):
        yield
        return
    with _registering:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            with suppress(ValueError):
                cloudpickle.unregister_pickle_by_value(module)


def _explain(function: Callable[..., Any], parts: list[tuple[str, Any]], error: Exception) -> str:
    culprit = unpicklable(parts)
    what = f"{culprit} cannot be pickled" if culprit else "it cannot be pickled"
    return (
        f"{_label(function)} cannot be sent to the ranks: {what} ({type(error).__name__}: {error}). "
        "Make it inside the function, or pass what it is made from."
    )


def _weigh(function: Callable[..., Any], parts: list[tuple[str, Any]], size: int) -> None:
    heaviest = ", ".join(f"{part} {megabytes(weight)}" for part, weight in largest(parts))
    text = (
        f"{_label(function)} and its arguments take {megabytes(size)} pickled, and every rank loads its own copy. "
        f"The largest parts: {heaviest}. Load data inside the function instead of passing it."
    )
    if size > LIMIT_BYTES:
        raise PayloadError(f"{text} The limit is {megabytes(LIMIT_BYTES)}.")
    warnings.warn(text, UserWarning, stacklevel=_outside_stacklevel())


def _label(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def megabytes(size: int) -> str:
    """A size as a person says it."""
    return f"{size / (1 << 20):,.1f} MiB"


def _outside_stacklevel() -> int:
    """The `stacklevel` of the first frame that is not of this package."""
    package = str(Path(__file__).parent)
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - the documented way to the calling frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level
