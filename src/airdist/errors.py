"""What can go wrong in a launch, as types.

An exception of the user's own function travels back as itself, with a note on where it happened; the classes here are
for everything else: a request that cannot be met, a payload that cannot travel, a rank that died, a limit that passed.
All of them derive from `AirdistError` and also from the built-in that a caller would guess, survive pickling, and carry
what a program needs to react (`rank`, `signal`, `exit_code`, `stacks`) as attributes. Whatever a launch raises has the
attribute `launch` (`airdist.failure.LaunchFailure`): all failures, and the results of ranks that had finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AgentDiedError",
    "AirdistError",
    "DeviceError",
    "DistributedTimeoutError",
    "LaunchCancelledError",
    "LaunchError",
    "NestedLaunchError",
    "NodeLostError",
    "PayloadError",
    "RankDiedError",
    "RankError",
    "RankExitError",
    "ResultError",
]


class AirdistError(Exception):
    """Base of every error that this package raises."""


class DeviceError(AirdistError, RuntimeError):
    """The accelerators asked for are not there."""


class PayloadError(AirdistError, TypeError):
    """The function, its captures or its arguments cannot travel to the ranks; nothing was started."""


class LaunchError(AirdistError, RuntimeError):
    """The launch itself failed, before or outside the user's function."""


class NestedLaunchError(LaunchError):
    """`.distributed()` was called inside a rank of a launch of ours."""


class AgentDiedError(LaunchError):
    """The supervising agent died; the kernel has ended its ranks."""


class NodeLostError(LaunchError):
    """A node of the launch has disappeared: its machine, its agent, or the way to it.

    Attributes:
        node: rank of the node.
        host: name of its machine.
    """

    def __init__(self, message: str, *, node: int, host: str) -> None:
        super().__init__(message)
        self.node = node
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class LaunchCancelledError(LaunchError):
    """The launch was cancelled through its handle."""


class RankError(AirdistError, RuntimeError):
    """One rank failed.

    Raised itself as the stand-in for an exception that could not be pickled: it then has that exception's type and
    message in its text and the formatted traceback of the rank as its cause.

    Attributes:
        rank: global rank that failed.
        type_name: qualified name of the exception that this one stands for, or None.
    """

    def __init__(self, message: str, *, rank: int, type_name: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException.__reduce__ replays args alone, which the keyword-only parameters would refuse.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class RankDiedError(RankError):
    """A rank was ended by a signal (an out-of-memory kill, a crash in native code) and could say nothing itself.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, message: str, *, rank: int, signal: int) -> None:
        super().__init__(message, rank=rank)
        self.signal = signal


class RankExitError(RankError):
    """A rank left through `sys.exit` or `os._exit` instead of returning.

    Attributes:
        exit_code: status that the rank exited with.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int) -> None:
        super().__init__(message, rank=rank)
        self.exit_code = exit_code


class ResultError(RankError):
    """A rank returned a value that cannot be pickled, or that cannot be read back."""


class DistributedTimeoutError(AirdistError, TimeoutError):
    """The launch did not end within its `timeout`; every rank's stacks were written down, then all were stopped.

    Attributes:
        stacks: for each rank the stacks of its threads, innermost call first.
    """

    def __init__(self, message: str, *, stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = dict(stacks or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[Exception], args: tuple[object, ...], state: dict[str, object]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
