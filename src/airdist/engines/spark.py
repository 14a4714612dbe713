"""Spark: a barrier job of one task for each node, on the session of this process; each task holds its node's agent.

    caller ── barrier job, in a thread of its own ──> task k: tether ── agent of node k
           ── every half second: what Spark says of the job's stage ──> queued, running, ended

Barrier: Spark starts all tasks at the same time or none. It would also start all of them again when one has failed,
behind the back of a launch that has seen a node go; so a stage with a failed task is cancelled, and `max_restarts`
alone decides.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from airdist.engines import held, spark_task
from airdist.engines.remote import RemoteEngine
from airdist.engines.tether import tethered
from airdist.errors import LaunchError
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.engines.base import Order
    from airdist.engines.remote import AgentCommand, RemoteAgents

__all__ = ["SparkEngine"]

logger = logging.getLogger("airdist")

_AGENT_SECONDS = 25.0  # for an agent that is asked to end; its ranks have 10 by default
_WATCH_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0  # executors of a session that has just been made are still coming
_AGAIN_SECONDS = 5.0
_END_SECONDS = 40.0  # for tasks of a job that was cancelled: Spark takes up to 4 s to kill one
_WORDS = 2000


class SparkEngine(RemoteEngine):
    """Starts agents as the tasks of a barrier job."""

    name: ClassVar[str] = "spark"
    keys: ClassVar[frozenset[str] | None] = frozenset({"cpus", "gpus"})

    def check(self, *, nodes: int, options: Mapping[str, Any]) -> None:
        """Refuse options that do not exist, and a process or a session that has no barrier jobs."""
        super().check(nodes=nodes, options=options)
        for name in ("cpus", "gpus"):
            value = options.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise LaunchError(f"engine_options: {name}={value!r}: it is a whole number for each node, 1 or more")
        conf = _context().getConf()
        if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            raise LaunchError(
                "engine='spark' runs a barrier job, and Spark has none where executors come and go: start the session "
                "with spark.dynamicAllocation.enabled=false and as many executors as nodes"
            )

    def start(self, order: Order) -> RemoteAgents:
        """As every engine of several machines; the executors' own search path stays, the caller's travels anyway."""
        assert order.spec.remote is not None
        environ = {name: value for name, value in order.spec.remote["environ"].items() if name != "PYTHONPATH"}
        return super().start(replace(order, spec=order.spec._replace(remote={**order.spec.remote, "environ": environ})))

    def spawn(self, command: AgentCommand) -> _Job:
        """Submit the job."""
        return _Job(command, _context())


def _context() -> Any:
    """The `SparkContext` of this process.

    Raises:
        LaunchError: there is none.
    """
    pyspark = sys.modules.get("pyspark")
    # `SparkSession.getActiveSession` knows the session of the thread that made it only, and `getOrCreate` makes one.
    context = None if pyspark is None else pyspark.SparkContext._active_spark_context  # noqa: SLF001 - see above
    if context is not None:
        return context
    if find_spec("pyspark") is None:
        raise LaunchError("engine='spark' needs Spark: install 'airdata[spark]', and a Java that it runs on")
    raise LaunchError(
        "engine='spark' runs on the SparkSession of this process, and there is none: make one before, by "
        "SparkSession.builder.getOrCreate(). It has to be a classic one (spark.sparkContext): Spark Connect has no "
        "barrier jobs of this kind"
    )


class _Job:
    """A barrier job; see `airdist.engines.remote.Spawned`."""

    def __init__(self, command: AgentCommand, context: Any) -> None:
        self._command = command
        self._context = context
        self._attempt = 0
        self._start()

    def _start(self) -> None:
        from pyspark import InheritableThread, cloudpickle  # noqa: PLC0415 - where a session is, it is imported

        for module in (spark_task, held):
            cloudpickle.register_pickle_by_value(module)
        self._group = self._command.job if not self._attempt else f"{self._command.job}-{self._attempt}"
        self._state, self._words = "queued", "the job has not started yet"
        self._closing = threading.Event()
        # It inherits what the caller has set for its jobs, such as the scheduler pool; the job group is its own.
        self._thread = InheritableThread(target=self._run, name=f"airdist-spark-{self._group}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name=f"airdist-spark-watch-{self._group}", daemon=True).start()

    @property
    def job_id(self) -> str:
        """The job group, by which Spark's own pages and `cancelJobGroup` know it."""
        return self._group

    def state(self) -> str:
        """As the threads have last seen it."""
        return self._state

    def words(self) -> str:
        """What there is to say of the job."""
        return self._words

    def again(self) -> bool:
        """Run the job again, in whatever places the cluster has by now, if there is still a cluster."""
        self.close(_AGAIN_SECONDS)
        if self._context is not _active():
            return False
        self._attempt += 1
        self._start()
        return True

    def close(self, seconds: float) -> None:
        """Wait for the agents, and cancel the job if they do not end."""
        self._thread.join(seconds)
        self._closing.set()
        deadline = time.monotonic() + _END_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._cancel()  # time and again: what Spark has not heard of yet cannot be cancelled
            self._thread.join(_WATCH_SECONDS)
        # Spark lets the job go at once, and its tasks only when they have been killed.
        with suppress(Exception):
            while any(stage.numActiveTasks for stage in self._stages()) and time.monotonic() < deadline:
                time.sleep(_WATCH_SECONDS / 5)

    def _run(self) -> None:
        """The job's thread: submit it, and wait for its end."""
        command, context = self._command, self._context
        argvs = [tethered(command.argv(n), seconds=_AGENT_SECONDS, python=command.python) for n in range(command.nodes)]
        # The interpreter of a Spark worker is the cluster's choice, unless the user has named another.
        any_python = command.python if command.python == sys.executable else None
        task = partial(spark_task.run_agent, environ=command.environ(), any_python=any_python)
        try:
            context.setJobGroup(self._group, f"airdist: {command.job}", interruptOnCancel=True)
            places = context.parallelize(argvs, command.nodes)
            if (profile := _profile(command.options)) is not None:
                places = places.withResources(profile)
            if self._wait_for_slots(places):
                self._end(places.barrier().mapPartitions(task).collect())
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is to see it
            self._words = _said(error)
        finally:
            self._state = "ended"

    def _end(self, agents: list[tuple[int, int, str]]) -> None:
        failed = [f"node {node}: its agent ended with {code}: {output}" for node, code, output in agents if code]
        self._words = "; ".join(failed)[-_WORDS:]
        if output := "".join(f"node {node}: {output}\n" for node, _, output in agents if output):
            with suppress(OSError), RunDirectory(self._command.directory).agent_log.open("a") as log:
                log.write(output)

    def _wait_for_slots(self, places: Any) -> bool:
        """Whether there are as many slots as nodes; Spark itself asks 40 times, every 15 s, and cannot be cancelled."""
        nodes, since, warned = self._command.nodes, time.monotonic(), False
        while (slots := _slots(self._context, places)) is not None and slots < nodes:
            asked = ", ".join(f"{count} {name}" for name, count in sorted(self._command.options.items()))
            each = f"of {asked} each" if asked else "of spark.task.cpus and spark.task.resource.* each"
            self._words = (
                f"{nodes} nodes are {nodes} tasks at the same time, {each}, and all executors together have room for "
                f"{slots}. Start the session with more or larger executors, or ask for fewer nodes"
            )
            waited = time.monotonic() - since
            if waited > _PATIENCE_SECONDS and not warned:
                warned = True
                logger.warning("%s waits: %s", self._command.job, self._words)
            if waited > self._command.seconds or self._closing.wait(_WATCH_SECONDS):
                return False
        self._words = f"waits until {nodes} of the cluster's slots are free at the same time"
        return not self._closing.is_set()

    def _watch(self) -> None:
        """The other thread: see the tasks start, and let Spark not start them again after a failure."""
        while self._thread.is_alive() and not self._closing.wait(_WATCH_SECONDS):
            with suppress(Exception):  # Spark is gone, which the job's thread tells
                for stage in self._stages():
                    if stage.numFailedTasks or stage.currentAttemptId:
                        self._cancel()
                    elif stage.numActiveTasks and self._state == "queued":
                        self._state, self._words = "running", "its tasks run"

    def _stages(self) -> list[Any]:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return [stage for stage in stages if stage is not None]

    def _cancel(self) -> None:
        with suppress(Exception):  # of a Spark that is gone
            self._context.cancelJobGroup(self._group)


def _active() -> Any:
    try:
        return _context()
    except LaunchError:
        return None


def _profile(options: Mapping[str, Any]) -> Any:
    """What each task asks for, or None for what the session has set."""
    if not options:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests  # noqa: PLC0415 - as in `_start`

    requests = TaskResourceRequests()
    if "cpus" in options:
        requests.cpus(options["cpus"])
    if "gpus" in options:
        requests.resource("gpu", options["gpus"])
    return ResourceProfileBuilder().require(requests).build


def _slots(context: Any, places: Any) -> int | None:
    """How many such tasks all executors together have room for; None where Spark does not tell."""
    with suppress(Exception):  # it has no public name for this number
        spark = context._jsc.sc()  # noqa: SLF001 - see above
        profile = places._jrdd.rdd().getResourceProfile()  # noqa: SLF001 - see above
        return int(spark.maxNumConcurrentTasks(profile or spark.resourceProfileManager().defaultResourceProfile()))
    return None


def _said(error: Exception) -> str:
    """An error of Spark's without the stack of its Java."""
    lines = (
        line for line in str(error).splitlines() if line.strip() and not re.match(r"\s+at |\s+\.\.\. \d+ more", line)
    )
    return f"{type(error).__name__}: {' '.join(map(str.strip, lines))}"[:_WORDS]
