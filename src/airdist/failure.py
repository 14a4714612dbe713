"""Which of several failures was the cause, and how it is told: in words, on the original exception object."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airdist.errors import RankDiedError, RankError, RankExitError
from airdist.outcome import RemoteTraceback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["LaunchFailure", "RankFailure", "cause", "death", "explain", "tail"]

_TAIL_BYTES = 1 << 14
_TAIL_LINES = 12
_CONNECTION_ERRORS = ("ConnectionError", "BrokenPipeError", "DistNetworkError", "DistBackendError", "DistStoreError")
_CONNECTION_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|connectFullMesh|gloo/transport|ncclRemoteError"
    r"|NCCL communicator was aborted|socket timeout",
    re.IGNORECASE,
)
_SIGNALS = {
    signal.SIGKILL: "if nobody did that on purpose, it was most likely the out-of-memory killer of the kernel or the "
    "container: look at the memory of the ranks and of their loader workers",
    signal.SIGSEGV: "a crash in native code; its Python stack is in the log",
    signal.SIGABRT: "native code gave up; its message is in the log",
    signal.SIGBUS: "often a full /dev/shm (shared memory of loader workers) or a mapped file that was cut short",
    signal.SIGTERM: "another process asked it to end",
}


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: global rank.
        error: what to raise for it.
        summary: type and message on one line.
        traceback: formatted traceback there, or "".
        host: name of its machine, or "".
        log: its complete output.
        at: time on the clock that the processes of a host share, in seconds; only differences mean anything.
    """

    rank: int
    error: BaseException
    summary: str
    traceback: str
    host: str
    log: Path
    at: float


@dataclass(frozen=True)
class LaunchFailure:
    """What rides on the exception of a failed launch, as its attribute `launch`.

    Attributes:
        run_dir: run directory, with the logs.
        failures: all ranks that failed by themselves, the cause first.
        results: what ranks that had finished returned, by rank.
    """

    run_dir: Path
    failures: tuple[RankFailure, ...] = ()
    results: Mapping[int, Any] = field(default_factory=dict)


def cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The earliest failure that is not merely the loss of a peer, or the earliest of all.

    A rank whose peer died fails too, with an error of the connection to it, and may well be noticed first.
    """
    return min(failures, key=lambda failure: (is_symptom(failure), failure.at))


def is_symptom(failure: RankFailure) -> bool:
    """Whether a failure says no more than that a peer is gone."""
    names = {kind.__name__ for kind in type(failure.error).__mro__}
    return not names.isdisjoint(_CONNECTION_ERRORS) or (
        isinstance(failure.error, RuntimeError)
        and not isinstance(failure.error, RankError)
        and bool(_CONNECTION_WORDS.search(str(failure.error)))
    )


def death(rank: int, returncode: int) -> RankError:
    """The error for a rank that ended without delivering anything.

    Args:
        rank: global rank.
        returncode: as `subprocess` has it: negative for a signal.
    """
    if returncode >= 0:
        return RankExitError(
            f"rank {rank} left with exit code {returncode} before the function returned "
            "(os._exit, or native code that ends the process)",
            rank=rank,
            exit_code=returncode,
        )
    number = -returncode
    try:
        name, hint = signal.Signals(number).name, _SIGNALS.get(signal.Signals(number), "")
    except ValueError:  # a real-time signal
        name, hint = f"signal {number}", ""
    text = f"rank {rank} was ended by {name} (exit code {128 + number})"
    return RankDiedError(f"{text}: {hint}" if hint else text, rank=rank, signal=number)


def explain(chosen: RankFailure, launch: LaunchFailure, world_size: int) -> BaseException:
    """The exception to raise: the original object, with where it happened, its traceback there and its last output."""
    error = chosen.error
    where = f"rank {chosen.rank} of {world_size}" + (f" on {chosen.host}" if chosen.host else "")
    note = f"[airdist] {where}; log: {chosen.log}"
    if others := [failure for failure in launch.failures if failure.rank != chosen.rank]:
        note += "".join(f"\n[airdist] also failed: rank {other.rank}: {other.summary}" for other in others)
    if lines := tail(chosen.log, before=chosen.traceback):
        note += "\n[airdist] its last output:\n" + "\n".join(f"    {line}" for line in lines)
    add_note(error, note)
    if chosen.traceback:
        error.__cause__ = RemoteTraceback(chosen.traceback.rstrip())
    error.launch = launch  # type: ignore[attr-defined]  # exceptions have a dictionary for such things
    return error


def tail(log: Path, *, before: str = "") -> list[str]:
    """The last lines of a log file, without the text that it ends with."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES - len(before.encode())))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.removesuffix(before).splitlines()
    return [line for line in lines if line.strip()][-_TAIL_LINES:]


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`, which Python 3.10 does not have yet."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined,unused-ignore]
