"""One launch under way, from the start of its agents to its results.

    start ── plan: checks, payload, run directory, MLflow run ── engine ──> agent
      │                                                                       │ started, log, restarting, ended
      └─> Launch ── a thread with a Listener, which collects at the end <─────┘

The listening thread alone moves a launch forward, so that an interrupt, which Python raises in the main thread, can
never lose half a message. The thread that waits for the result is also the one that displays output.
"""

from __future__ import annotations

import atexit
import logging
import textwrap
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airdist.collect import collect
from airdist.errors import LaunchCancelledError
from airdist.listener import Listener
from airdist.outcome import dump

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from airdist.display import Display
    from airdist.engines.base import Agents
    from airdist.plan import Plan
    from airdist.results import Results

__all__ = ["Launch"]

logger = logging.getLogger("airdist")

R = TypeVar("R")

_AGENT_EXIT_SECONDS = 5.0
_AT_EXIT_SECONDS = 30.0


class Launch(Generic[R]):
    """A launch under way: ask it for its result, wait for it with `await`, or cancel it.

    It lives as long as the process that started it; the ranks end with that process. Nothing is displayed: `logs` reads
    what a rank has written so far.
    """

    def __init__(self, plan: Plan, agents: Agents, display: Display) -> None:
        self._plan = plan
        self._agents = agents
        self._display = display
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._results: Results[R] | None = None
        self._error: BaseException | None = None
        self._listener = Listener(plan, agents, display)
        atexit.register(self._at_exit)
        threading.Thread(target=self._listen, name=f"airdist-{plan.name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "finished" if self._error is None else f"failed ({self._error!r})"
        count = self._listener.world_size or "all"
        return f"<Launch {self._plan.name}: {state}, {count} processes, run_dir={self.run_dir}>"

    def __await__(self) -> Generator[Any, None, Results[R]]:
        """Wait without blocking the event loop."""
        import asyncio  # noqa: PLC0415 - 60 ms of the first launch of everybody who does not await one

        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    @property
    def run_dir(self) -> Path:
        """The run directory, with the logs of all ranks."""
        return self._plan.directory.path

    @property
    def job_id(self) -> str | None:
        """What the scheduler calls the job; None where no scheduler is involved."""
        return self._agents.job_id

    def done(self) -> bool:
        """Whether the launch has ended, one way or another."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Results[R]:
        """Wait for the return values, by rank, or raise what went wrong.

        Args:
            timeout: seconds to wait; the launch itself goes on when they have passed.

        Raises:
            TimeoutError: when the launch has not ended by then.
            LaunchCancelledError: when it was cancelled.
            Exception: the original exception of the rank that failed, with its traceback there as `__cause__`, where
                it happened in its notes, and `launch` (`airdist.failure.LaunchFailure`) as an attribute.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._results is not None
        return self._results

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return what `result` would raise, or None."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self._plan.name} has not ended within {timeout} s; it goes on (run {self.run_dir})")
        return self._error

    def cancel(self, *, now: bool = False) -> bool:
        """Have the ranks end, within their grace; `result` will raise `LaunchCancelledError`.

        Args:
            now: end them at once.

        Returns:
            False if the launch had ended already.
        """
        if self.done():
            return False
        self._listener.cancel(now=now)
        return True

    def logs(self, rank: int = 0) -> str:
        """What a rank has written so far, in the latest attempt."""
        if rank < 0 or (self._listener.world_size is not None and rank >= self._listener.world_size):
            known = "" if self._listener.world_size is None else f" to {self._listener.world_size - 1}"
            raise ValueError(f"rank {rank}: there are ranks 0{known}")
        path = self._plan.directory.log(rank, self._listener.attempt)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def watch(self) -> Results[R]:
        """Display output until the launch ends, and return its result: what `.distributed()` does.

        An interrupt ends the ranks within their grace and is raised again after that; a second one ends them at once,
        and a third does not wait.
        """
        console = self._display.console(self._listener.world_size)
        interrupts: list[KeyboardInterrupt] = []
        while True:
            try:
                self._display.show_until(self.done, console)
                break
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)
                if len(interrupts) > 2:  # noqa: PLR2004 - the third
                    raise
                self.cancel(now=len(interrupts) > 1)
        if interrupts:
            raise interrupts[0]
        return self.result()

    def _listen(self) -> None:
        """Follow the agent to the end, then settle everything; runs in a thread of its own."""
        status: str = "FAILED"
        try:
            self._display.note(_opening(self._plan, self._agents.job_id))
            ended = self._follow()
            if ended["leftovers"]:
                self._display.note(
                    f"processes {ended['leftovers']} withstand SIGKILL (stuck in the kernel); they were left"
                )
            self._results = collect(ended, self._plan.directory, timeout=self._plan.settings.timeout)
            status = "FINISHED"
        except LaunchCancelledError as error:
            self._error, status = error, "KILLED"
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that asks for the result
            # Where this thread put it together tells nobody anything; the rank's own traceback is its cause.
            self._error = error.with_traceback(None) if hasattr(error, "launch") else error
        try:
            with ExitStack() as steps:  # the last comes first, and each is made whatever becomes of the others
                steps.callback(self._record, status)
                steps.callback(self._agents.close, _AGENT_EXIT_SECONDS if self._agents.channel is not None else 0)
                steps.callback(self._agents.share, lambda: dump(self._results, self._error))
        except Exception:
            logger.exception("%s: its result stands, but something was not put in order after it", self._plan.name)
        finally:
            self._ended.set()
            self._display.wake()
            atexit.unregister(self._at_exit)

    def _follow(self) -> dict[str, Any]:
        try:
            return self._listener.follow()
        except BaseException:
            if self._agents.channel is not None:
                self._agents.channel.close()  # an agent that lives on ends its ranks when its caller has hung up
            raise

    def _record(self, status: str) -> None:
        """Put the run directory and the MLflow run in order, and say how it went."""
        plan, seconds = self._plan, time.monotonic() - self._started
        plan.directory.remove_empty_logs()
        if self._error is None:
            plan.directory.remove_data()
        else:
            first = textwrap.shorten(str(self._error).strip().partition("\n")[0], 160, placeholder=" …")
            self._display.note(f"{plan.name} failed after {seconds:.1f} s: {type(self._error).__name__}: {first}")
        if plan.run is not None:
            tags = {
                "world_size": str(self._listener.world_size or 0),
                "restarts": str(self._listener.attempt),
            } | self._listener.nodes.tags()
            if failures := getattr(getattr(self._error, "launch", None), "failures", ()):
                tags |= {"failed_rank": str(failures[0].rank), "failure": failures[0].summary[:250]}
            plan.run.finish(status, tags=tags, logs=plan.directory.logs)  # type: ignore[arg-type]

    def _at_exit(self) -> None:
        self.cancel(now=True)
        self._ended.wait(_AT_EXIT_SECONDS)


def _opening(plan: Plan, job_id: str | None) -> str:
    count = plan.world_size
    what = f"{count or 'all'} {'process' if count == 1 else 'processes'}"
    if plan.allocation is not None:
        what += f" on {plan.allocation.accelerator_type or 'CPU'}"
    else:
        what += f" on {plan.settings.nodes} {'node' if plan.settings.nodes == 1 else 'nodes'} by {plan.engine.name}"
        what += f" (job {job_id})" if job_id else ""
    link = f"; MLflow run: {plan.run.link}" if plan.run else ""
    return f"{plan.name}: {what}; logs: {plan.directory.logs}{link}"
