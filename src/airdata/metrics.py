"""Numbers about the flow of data, and the thread that hands them to MLflow.

    dataset, loader ──► Counters            plain sums, added up by whoever owns the process
    training loop   ──► Reporter.put()      a dictionary update, no more
                          └─► _Outbox, a daemon thread ──► MLflow, one point per key and interval

Training never waits for a tracking server: a ``log_param`` was seen to stall it for 13 minutes, and a quota of steps to
freeze its charts.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from airdata.topology import Topology

__all__ = ["Counters", "Reporter", "active_run"]

_log = logging.getLogger(__name__)

# A key per batch number, or such a slip, must not grow without end.
_MOST_KEYS = 256
_MOST_STEPS = 4096
# How long the end of the program waits for the last points: a short one has sent none before.
_EXIT_SECONDS = 5.0


@dataclass
class Counters:
    """What happened to the files of one reader; every field only grows.

    Attributes:
        files: files delivered.
        bytes_fetched: bytes that came from the source.
        hits: files that were on local disk already.
        misses: files that had to be fetched.
        retries: repeated requests.
        bad_files: files that could not be read.
        wait_seconds: time the consumer waited for a file: the number to bring down.
    """

    files: int = 0
    bytes_fetched: int = 0
    hits: int = 0
    misses: int = 0
    retries: int = 0
    bad_files: int = 0
    wait_seconds: float = 0.0

    def add(self, other: Counters) -> None:
        """Add another reader's counts to these."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count_file(self, size: int, *, hit: bool) -> None:
        """One file of ``size`` bytes was delivered."""
        self.files += 1
        if hit:
            self.hits += 1
        else:
            self.misses += 1
            self.bytes_fetched += size

    def minus(self, earlier: Counters) -> Counters:
        """What happened since ``earlier``, a copy of these counts."""
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name in _NAMES))

    def copy(self) -> Counters:
        """These counts as they are now."""
        return Counters(*(getattr(self, name) for name in _NAMES))

    def as_dict(self) -> dict[str, int | float]:
        """Plain numbers by name."""
        return {name: getattr(self, name) for name in _NAMES}

    def as_metrics(self) -> dict[str, float]:
        """What MLflow is told, by key."""
        return {
            "fetch_files": self.files,
            "fetch_bytes": self.bytes_fetched,
            "fetch_hits": self.hits,
            "fetch_retries": self.retries,
            "fetch_bad_files": self.bad_files,
        }

    def __repr__(self) -> str:
        reads = self.hits + self.misses
        rate = f" ({self.hits / reads:.0%} hits)" if reads else ""
        return (
            f"Counters({self.files} files{rate}, {self.bytes_fetched / 2**20:.1f} MiB fetched, {self.misses} misses, "
            f"{self.retries} retries, {self.bad_files} bad, {self.wait_seconds:.2f} s waited)"
        )


_NAMES = tuple(field.name for field in fields(Counters))


class Reporter:
    """Hands numbers to the MLflow run that is active where they are put.

    A daemon thread sends them: per key at most one point each ``interval`` seconds, the mean of what was put since the
    last. Only rank 0 reports. Without a run, or when neither this process has imported mlflow nor ``MLFLOW_RUN_ID`` is
    set, nothing happens. No call blocks on the tracking server or raises because of it; its trouble is logged once.
    What is left is sent when the reporter is closed or collected, and at the end of the program, which waits for that
    a few seconds at most.

    Args:
        interval: seconds between two points of a key.
        rank: this process's rank; found by :meth:`airdata.topology.Topology.current` when left out.
    """

    def __init__(self, *, interval: float = 5.0, rank: int | None = None) -> None:
        self._interval = interval
        self._rank = rank
        self._pid = os.getpid()
        self._outbox = _Outbox(interval)
        # Not by the thread's reference to us: it would keep every loader that ever reported, and run for each.
        weakref.finalize(self, self._outbox.stop).atexit = False

    def __reduce__(self) -> tuple[object, ...]:
        return _reporter, (self._interval, self._rank)

    def put(self, name: str, value: float, run: str | None = None) -> None:
        """Note one value. Costs microseconds; never blocks on I/O, never raises for want of a run.

        Args:
            name: the key.
            value: its value now.
            run: id of the run, for threads of our own; by default :func:`active_run` of the calling thread.
        """
        if os.getpid() != self._pid:  # a forked worker would repeat its parent's points
            return
        run = run or active_run()
        if run is not None and self._find_rank() == 0:
            self._outbox.put(run, name, value)

    def watch(self, totals: Callable[[], Mapping[str, float]]) -> None:
        """Whenever something is sent, send too what the bound method ``totals`` returns, for as long as it lives."""
        self._outbox.totals = weakref.WeakMethod(totals)

    def close(self, timeout: float = _EXIT_SECONDS) -> None:
        """Send what is left and stop; gives up after ``timeout`` seconds. More than once is fine."""
        if os.getpid() == self._pid:
            self._outbox.stop()
            self._outbox.join(timeout)

    def _find_rank(self) -> int:
        if self._rank is None:
            try:
                self._rank = Topology.current().rank
            except Exception:  # noqa: BLE001 - contradicting rank facts are the dataset's to report, not ours
                self._rank = 0
        return self._rank


@dataclass
class _Series:
    """Values of one key and run that were put and not sent yet."""

    total: float = 0.0
    count: int = 0


# How often each key of a run was put, by whichever loader.
_steps: Counter[tuple[str, str]] = Counter()


class _Outbox:
    """What was put and not sent, and the thread that sends it."""

    def __init__(self, interval: float) -> None:
        self.totals: Callable[[], Callable[[], Mapping[str, float]] | None] = lambda: None
        self._interval = interval
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], _Series] = {}
        self._stopped = False
        # The garbage collector may stop us in any thread at any point, also in ours while it waits: no other queue and
        # no event may be used there.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._warned = False

    def put(self, run: str, name: str, value: float) -> None:
        key = (run, name)
        with self._lock:
            if self._stopped or (key not in self._pending and len(self._pending) >= _MOST_KEYS):
                return
            series = self._pending.setdefault(key, _Series())
            series.total += value
            series.count += 1
            _steps[key] += 1
            if len(_steps) > _MOST_STEPS:
                del _steps[next(iter(_steps))]
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_until_stopped, name="airdata-reporter", daemon=True)
                self._thread.start()
                _started.add(self)

    def stop(self) -> None:
        self._stopped = True
        self._bell.put(None)

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _send_until_stopped(self) -> None:
        while not self._stopped:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=self._interval)
            self._send()
        self._send()

    def _send(self) -> None:
        points: dict[str, list[tuple[str, float, int]]] = {}
        with self._lock:
            for (run, name), series in self._pending.items():
                points.setdefault(run, []).append((name, series.total / series.count, _steps[run, name]))
            self._pending.clear()
        totals = self.totals()
        for run, metrics in points.items():
            step = max(step for _, _, step in metrics)
            if totals is not None:
                metrics += [(name, value, step) for name, value in totals().items()]
            self._send_to(run, metrics)

    def _send_to(self, run: str, metrics: list[tuple[str, float, int]]) -> None:
        now = time.time_ns() // 1_000_000
        try:
            mlflow = importlib.import_module("mlflow")
            entities = [mlflow.entities.Metric(name, value, now, step) for name, value, step in metrics]
            mlflow.MlflowClient().log_batch(run, metrics=entities)
        except Exception as error:  # noqa: BLE001 - tracking trouble never stops training
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(level, "metrics could not be sent to MLflow run %s; training goes on: %s", run, error)


_started: weakref.WeakSet[_Outbox] = weakref.WeakSet()


@atexit.register
def _send_the_rest() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    outboxes = list(_started)
    for outbox in outboxes:
        outbox.stop()
    for outbox in outboxes:
        outbox.join(max(0.0, deadline - time.monotonic()))


def _reporter(interval: float, rank: int | None) -> Reporter:
    return Reporter(interval=interval, rank=rank)


def active_run() -> str | None:
    """The id of the run that is active in the calling thread: MLflow keeps its stack of runs by thread."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None:
        with contextlib.suppress(Exception):  # another thread may be in the middle of importing it
            run = mlflow.active_run()
            if run is not None:
                return str(run.info.run_id)
    return os.environ.get("MLFLOW_RUN_ID") or None
