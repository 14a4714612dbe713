"""The threads of checkpoints: those that share jobs out among them, and the one that saves behind training.

jobs ──each()──► a few threads ──► results; the first failure stops the rest and is raised
save ──begin()─► one thread ──► Future, which the end of the program waits for

Plain threads, not executors: those refuse work once the interpreter ends, when the last save may be half done. The end
waits before that all the same, since storage drivers have executors too.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # hooks of the end run last to first: its own must be there before ours
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from airdata.transport.retry import describe

__all__ = ["begin", "each"]

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def each(work: Callable[[T], R], jobs: Sequence[T], threads: int, name: str, stop: threading.Event) -> list[R]:
    """The results of all jobs, in their order.

    Args:
        work: done for each job.
        jobs: begun in this order.
        threads: at work at the same time, at most.
        name: of the threads.
        stop: set by the first failure and by an interrupt; no job begins after that, and ``work`` may look at it.

    Raises:
        BaseException: what the job that failed first raised, once every thread has ended.
    """
    todo = iter(enumerate(jobs))
    lock = threading.Lock()
    results: dict[int, R] = {}
    failures: list[BaseException] = []

    def run() -> None:
        while not stop.is_set():
            with lock:
                index, job = next(todo, (None, None))
            if index is None:
                return
            try:
                results[index] = work(job)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - raised below; DCP's own derive from BaseException
                failures.append(error)
                stop.set()

    started: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(jobs))):
            thread = threading.Thread(target=run, name=name)
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:
        stop.set()  # an interrupt: do not finish gigabytes first
        for thread in started:
            thread.join()
        raise
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(jobs))]


def begin(work: Callable[[], R], what: str, patience: float) -> Future[R]:
    """Do something in a thread that the end of the program waits for.

    Args:
        work: what to do.
        what: names it in the log, should it fail and nobody have asked by the end; see :func:`claim`.
        patience: seconds after which the end of the program waits no longer.
    """
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="airdata-checkpoint").start()
    _unclaimed[future] = what, time.monotonic() + patience
    future.add_done_callback(_forget_success)
    return future


def claim(future: Future[R]) -> R:
    """The result of what was begun; a failure is raised here, and then no longer logged at the end."""
    try:
        return future.result()
    finally:
        if future.done():
            _unclaimed.pop(future, None)


def _forget_success(future: Future[Any]) -> None:
    if future.exception() is None:
        _unclaimed.pop(future, None)


def _finish() -> None:
    for future, (what, deadline) in list(_unclaimed.items()):
        concurrent.futures.wait([future], max(0.0, deadline - time.monotonic()))
        _unclaimed.pop(future, None)
        if not future.done():
            _log.error("%s has not ended in its time, and is lost if the process ends now", what)
        elif (error := future.exception()) is not None:
            _log.error("%s failed, and the program has ended without asking: %s", what, describe(error))


# What was begun, and neither has succeeded nor been claimed: its name and the deadline of the end.
_unclaimed: dict[Future[Any], tuple[str, float]] = {}

os.register_at_fork(after_in_child=_unclaimed.clear)  # the threads are the parent's
# Where exit handlers run without a shutdown of the interpreter, as in a rank of airdist, this one alone is called.
atexit.register(_finish)
with contextlib.suppress(AttributeError, RuntimeError):  # no public hook runs before executors are shut down
    threading._register_atexit(_finish)  # type: ignore[attr-defined]  # noqa: SLF001
