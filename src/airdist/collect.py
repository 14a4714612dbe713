"""The end of a launch: what the agent says of it, and the files of its ranks, become results or one exception."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airdist import errors
from airdist.errors import (
    AirdistError,
    DistributedTimeoutError,
    LaunchCancelledError,
    LaunchError,
    NodeLostError,
    RankDiedError,
)
from airdist.failure import LaunchFailure, RankFailure, cause, death, explain, tail
from airdist.outcome import read
from airdist.results import Results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.rundir import RunDirectory

__all__ = ["collect"]


def collect(ended: Mapping[str, Any], directory: RunDirectory, *, timeout: float | None) -> Results[Any]:
    """The results of a launch.

    Args:
        ended: last message of the agent.
        directory: run directory.
        timeout: what the launch was given, in seconds, for the message.

    Raises:
        LaunchCancelledError: when it was told to stop.
        LaunchError: when a node did not come, refused, or disappeared.
        DistributedTimeoutError: when it ran out of time, with the stacks of all ranks.
        Exception: what the rank raised that failed first, see `airdist.failure`.
    """
    attempt, nprocs = ended["attempt"], len(ended["ranks"])
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    for rank in ended["ranks"]:
        _sort_out(rank, directory, attempt, results, failures)
    reason = ended["reason"]
    if reason == "terminated":  # ranks that heard of it before their agent did have not failed
        failures = [failure for failure in failures if not _was_asked_to_end(failure.error)]
    if reason in {"refused", "absent"}:
        raise _not_started(ended)
    if reason == "timeout":
        error: BaseException = _timed_out(directory, attempt, nprocs, timeout, results)
    elif failures:
        chosen = cause(failures)
        ordered = (chosen, *sorted((f for f in failures if f is not chosen), key=lambda failure: failure.at))
        raise explain(chosen, LaunchFailure(directory.path, ordered, results), nprocs)
    elif reason == "finished":
        return Results(results[rank] for rank in range(nprocs))
    else:
        taken = f"ended by SIGTERM to the agent of {ended.get('taken') or 'node 0'} (by its scheduler, most likely)"
        how = taken if reason == "terminated" else "cancelled"
        error = LaunchCancelledError(f"the launch was {how}; logs: {directory.logs}")
    error.launch = LaunchFailure(directory.path, tuple(failures), results)  # type: ignore[attr-defined]
    raise error


def _was_asked_to_end(error: BaseException) -> bool:
    return isinstance(error, RankDiedError) and error.signal == signal.SIGTERM


def _sort_out(
    rank: Mapping[str, Any],
    directory: RunDirectory,
    attempt: int,
    results: dict[int, Any],
    failures: list[RankFailure],
) -> None:
    """Put what became of one rank where it belongs; a rank that was told to end belongs nowhere."""
    number, log = rank["rank"], directory.log(rank["rank"], attempt)
    if rank["outcome"] is not None:
        record, body = read(directory.result(number, attempt), rank=number)
        if record.kind == "value":
            results[number] = body
        else:
            failures.append(RankFailure(number, body, record.summary, record.traceback, record.host, log, rank["at"]))
    elif not rank["stopped"] and rank["lost"]:
        gone = NodeLostError(rank["lost"], node=rank["node"], host=rank["host"])
        failures.append(RankFailure(number, gone, rank["lost"], "", rank["host"], log, rank["at"]))
    elif not rank["stopped"] and rank["returncode"] is not None:
        error = death(number, rank["returncode"])
        failures.append(RankFailure(number, error, str(error), "", rank["host"], log, rank["at"]))


def _not_started(ended: Mapping[str, Any]) -> AirdistError:
    """Why nothing was started; what a node refused for is raised as the error that it would be here."""
    if ended["refused"]:
        first = ended["refused"][0]
        kind = getattr(errors, first["error"], LaunchError)
        texts = [f"node {refusal['node']} ({refusal['host']}): {refusal['text']}" for refusal in ended["refused"]]
        error: AirdistError = kind("\n".join(texts))
        return error
    absent = ", ".join(map(str, ended["absent"]))
    return LaunchError(
        f"these nodes did not come within the time to start: {absent} (of {ended['nodes']}; node 0 was there). "
        "engine_options={'start_timeout': ...} gives them longer"
    )


def _timed_out(
    directory: RunDirectory, attempt: int, nprocs: int, timeout: float | None, results: Mapping[int, Any]
) -> DistributedTimeoutError:
    stacks = {}
    lines = []
    for rank in range(nprocs):
        if rank in results:
            lines.append(f"  rank {rank}: had returned")
            continue
        stacks[rank] = _text(directory.stacks(rank))
        last = tail(directory.log(rank, attempt))[-1:] or ["(nothing)"]
        lines.append(f"  rank {rank}: {_innermost(stacks[rank]) or 'no stack'}; last output: {last[0]}")
    return DistributedTimeoutError(
        f"the launch did not end within its timeout of {timeout:g} s and was stopped. Where its ranks were:\n"
        + "\n".join(lines)
        + f"\nAll stacks: {directory.logs}/rank-*.stacks (and `stacks` on this exception). "
        "timeout=None or a longer one lets it go on.",
        stacks=stacks,
    )


def _innermost(stacks: str) -> str:
    """The innermost call of the main thread: faulthandler writes that thread last, its innermost call first."""
    main = stacks.strip().split("\n\n")[-1].splitlines()
    return next((line.strip() for line in main if line.lstrip().startswith("File ")), "")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
