"""What a rank returned or raised, on its way to the caller: cloudpickle in a file of the run directory.

A file holds two pickles: a `Record` of plain values, which always loads, then the value or the exception. It is written
under a temporary name and renamed, so that the caller sees all of it or nothing, whatever its size. With cloudpickle on
both sides a class that was defined in a notebook comes back as the same class, and `except MyError` works.
"""

from __future__ import annotations

import io
import pickle
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cloudpickle

from airdist.captures import unpicklable_part
from airdist.errors import RankError, RankExitError, ResultError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Raised", "Record", "RemoteTraceback", "Returned", "dump", "read", "write"]

_CHECK_BYTES = 16 << 20  # a larger value is not loaded again in the rank, which may not have the memory for two
_SUMMARY_CHARACTERS = 500
_PACKAGE = str(Path(__file__).parent)


class Returned(NamedTuple):
    """The function returned."""

    value: Any


class Raised(NamedTuple):
    """The function raised, or could not even be loaded."""

    error: BaseException
    while_loading: bool = False


class Record(NamedTuple):
    """What is known of an outcome without unpickling anything of the user's.

    Attributes:
        kind: whether the rank returned or failed.
        summary: the exception's type and message on one line.
        traceback: the formatted traceback, without the frames of this package.
        host: name of the machine.
        while_loading: whether the function could not be loaded.
    """

    kind: Literal["value", "error"]
    summary: str = ""
    traceback: str = ""
    host: str = ""
    while_loading: bool = False


class RemoteTraceback(Exception):  # noqa: N818 - it is no error itself; it shows the other process's traceback
    """Cause of an exception that came from a rank: prints as the traceback there."""

    def __str__(self) -> str:
        """The rank's traceback, set off from the caller's."""
        return f"\n{self.args[0]}"


def write(outcome: Returned | Raised, path: Path, *, rank: int) -> Record:
    """Write an outcome to `path` and return its record; never raises for what is in the outcome.

    `sys.exit()` and `sys.exit(0)` count as returning None. A value that does not survive pickling becomes a
    `ResultError` that names the part at fault.
    """
    if isinstance(outcome, Raised) and isinstance(outcome.error, SystemExit) and outcome.error.code in (None, 0):
        outcome = Returned(None)
    if isinstance(outcome, Returned):
        record = Record("value", host=socket.gethostname())
        try:
            _store(path, record, outcome.value)
            _check(path)
        except Exception as error:  # noqa: BLE001 - whatever pickling raised, the caller is to hear of it
            outcome = Raised(_result_error(outcome.value, error, rank))
        else:
            return record
    record = _describe(outcome)
    _store(path, record, _presentable(outcome.error, record, rank))
    return record


def read(path: Path, *, rank: int) -> tuple[Record, Any]:
    """The record and the value or exception that a rank left at `path`.

    A value that does not load here, though it did in the rank, is returned as the exception to raise.
    """
    with path.open("rb") as file:
        record: Record = pickle.load(file)  # noqa: S301 - written by this user's own rank, mode 0700
        try:
            return record, pickle.load(file)  # noqa: S301 - as above
        except Exception as error:  # noqa: BLE001 - any failure to load is the answer
            message = f"what rank {rank} delivered cannot be loaded here: {type(error).__name__}: {error}"
            failure = ResultError(f"{message} ({record.summary})" if record.summary else message, rank=rank)
            return Record("error", str(failure), record.traceback, record.host), failure


def dump(value: Any, error: BaseException | None) -> bytes:
    """The outcome of a whole launch, for the processes on other nodes that take part in it.

    What does not survive pickling becomes a `ResultError` there, or for an exception a `RankError`.
    """
    if error is not None and not _survives(error, error):
        error = RankError(f"{type(error).__name__}: {error}", rank=-1, type_name=type(error).__qualname__)
    try:
        with io.BytesIO() as file:
            _Pickler(file, protocol=5).dump((value, error))
            return file.getvalue()
    except Exception as failure:  # noqa: BLE001 - whatever pickling raised, the other nodes are to hear of it
        message = f"the outcome cannot be sent to the other nodes: {type(failure).__name__}: {failure}"
        return cloudpickle.dumps((None, ResultError(message, rank=-1)))  # type: ignore[no-any-return]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Sends tensors as host memory: a result must outlive the device context of its rank."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            here = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                here = torch.nn.Parameter(here, requires_grad=obj.requires_grad)
            return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _store(path: Path, record: Record, body: Any) -> None:
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        pickle.dump(record, file, protocol=5)
        _Pickler(file, protocol=5).dump(body)
    partial.replace(path)


def _check(path: Path) -> None:
    if path.stat().st_size <= _CHECK_BYTES:
        with path.open("rb") as file:
            pickle.load(file)  # noqa: S301 - written two lines before
            pickle.load(file)  # noqa: S301 - as above


def _result_error(value: Any, error: Exception, rank: int) -> ResultError:
    culprit = unpicklable_part("the value", value) or f"the value (type {type(value).__qualname__})"
    return ResultError(
        f"rank {rank} returned what cannot be sent back: {culprit} ({type(error).__name__}: {error}). "
        "Return plain values, arrays or a state_dict instead.",
        rank=rank,
    )


def _describe(outcome: Raised) -> Record:
    error = outcome.error
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = "".join(traceback.format_exception(type(error), error, _trimmed(error.__traceback__)))
    return Record("error", summary[:_SUMMARY_CHARACTERS], text, socket.gethostname(), outcome.while_loading)


def _trimmed(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame that is the user's; if all are ours, all of it."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        first = first.tb_next
    return first or frames


def _presentable(error: BaseException, record: Record, rank: int) -> BaseException:
    """The exception itself if it survives pickling, else what comes closest to it.

    An exception with required constructor arguments pickles but does not unpickle, or comes back with another message
    (python/cpython#103061), so every candidate is loaded again here before it is sent.
    """
    if isinstance(error, SystemExit):
        text = error.code if isinstance(error.code, str) else f"exit code {error.code}"
        code = error.code if isinstance(error.code, int) else 1
        return RankExitError(f"rank {rank} left through sys.exit: {text}", rank=rank, exit_code=code)
    if isinstance(error, Exception):  # KeyboardInterrupt and its like would end the caller, who was not meant
        for candidate in (error, _Bare.of(error), _Bare.of(error, only_picklable=True)):
            if _survives(candidate, error):
                return candidate  # type: ignore[return-value]  # `_Bare` unpickles as the exception
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return RankError(f"rank {rank} raised {record.summary}", rank=rank, type_name=name)


def _survives(candidate: BaseException | _Bare, error: BaseException) -> bool:
    try:
        back = pickle.loads(cloudpickle.dumps(candidate))  # noqa: S301 - pickled on this line
        return type(back) is type(error) and str(back) == str(error)
    except Exception:  # noqa: BLE001 - then it does not
        return False


class _Bare(NamedTuple):
    """Pickles as an exception that is rebuilt without calling its constructor."""

    kind: type[Exception]
    args: tuple[Any, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, error: Exception, *, only_picklable: bool = False) -> _Bare:
        if not only_picklable:
            return cls(type(error), error.args, dict(error.__dict__))
        args = tuple(arg if _pickles(arg) else repr(arg) for arg in error.args)
        return cls(type(error), args, {name: value for name, value in error.__dict__.items() if _pickles(value)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.kind, self.args, self.state)


def _rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _pickles(value: Any) -> bool:
    return unpicklable_part("", value, depth=0) is None
