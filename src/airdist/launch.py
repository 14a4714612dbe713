"""One launch from call to results.

    start_launch ── plan: checks, payload, run directory, MLflow run ── engine ──> agent
         │                                                                         │ started, log, restarting, ended
         └─> Launch ── a thread that listens to the agent and collects <───────────┘

The listening thread alone moves a launch forward, so that an interrupt, which Python raises in the main thread, can
never lose half a message. The thread that waits for the result is also the one that displays output.
"""

from __future__ import annotations

import atexit
import logging
import queue
import selectors
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airdist import processes
from airdist.collect import collect
from airdist.errors import AgentDiedError, LaunchCancelledError, NodeLostError
from airdist.logs import Console, columns, redraws, show
from airdist.nodes import Nodes
from airdist.outcome import dump
from airdist.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from airdist.logs import Piece
    from airdist.plan import Plan
    from airdist.results import Results
    from airdist.settings import Settings

__all__ = ["Launch", "start_launch"]

logger = logging.getLogger("airdist")
R = TypeVar("R")

_BACKLOG_BYTES = 8 << 20  # output that the displaying thread has not taken; more is shown only by the files
_AGENT_EXIT_SECONDS = 5.0
_SWEEP_SECONDS = 5.0
_POLL_SECONDS = 0.5
_REDRAW_SECONDS = 0.2
_AT_EXIT_SECONDS = 30.0


def start_launch(
    function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, *, display: bool
) -> Launch[R]:
    """Start the ranks of one launch.

    Args:
        function: what every rank calls.
        args: its positional arguments, the same for every rank.
        kwargs: its keyword arguments.
        settings: how to launch it.
        display: whether the caller is going to show output as it comes, by `Launch.watch`.

    Raises:
        AirdistError: what `airdist.plan.make_plan` raises, before any process exists.
    """
    plan = make_plan(function, args, kwargs, settings)
    try:
        return Launch(plan, display=display)
    except BaseException:
        if plan.run is not None:
            plan.run.finish("FAILED")
        raise


class Launch(Generic[R]):
    """A launch under way: ask it for its result, wait for it with `await`, or cancel it.

    It lives as long as the process that started it; the ranks end with that process. Nothing is displayed: `logs` reads
    what a rank has written so far.
    """

    def __init__(self, plan: Plan, *, display: bool) -> None:
        self._plan = plan
        self._display = display and plan.settings.logs != "none"
        self._started = time.monotonic()
        self._events: queue.SimpleQueue[tuple[int, int, bytes] | str | None] = queue.SimpleQueue()
        self._backlog = 0
        self._dropped = 0
        self._attempt = 0
        self._sessions: set[int] = set()
        self._world_size = plan.world_size
        self._nodes = Nodes(plan.withheld)
        self._cancelled = False
        self._lost: NodeLostError | None = None
        self._ended = threading.Event()
        self._results: Results[R] | None = None
        self._error: BaseException | None = None
        self._sending = threading.Lock()
        self._agents = plan.engine.start(plan.order(forward_logs=self._display))
        atexit.register(self._at_exit)
        threading.Thread(target=self._listen, name=f"airdist-{plan.name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "finished" if self._error is None else f"failed ({self._error!r})"
        return f"<Launch {self._plan.name}: {state}, {self._world_size or 'all'} processes, run_dir={self.run_dir}>"

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
        self._cancelled = True
        with self._sending:
            if self._agents.channel is not None:
                self._agents.channel.send("kill" if now else "stop")
        return True

    def logs(self, rank: int = 0) -> str:
        """What a rank has written so far, in the latest attempt."""
        if rank < 0 or (self._world_size is not None and rank >= self._world_size):
            known = "" if self._world_size is None else f" to {self._world_size - 1}"
            raise ValueError(f"rank {rank}: there are ranks 0{known}")
        path = self._plan.directory.log(rank, self._attempt)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def watch(self) -> Results[R]:
        """Display output until the launch ends, and return its result: what `.distributed()` does.

        An interrupt ends the ranks within their grace and is raised again after that; a second one ends them at once,
        and a third does not wait.
        """
        live = redraws(sys.stdout) or redraws(sys.stderr)
        console = Console(self._world_size, self._plan.settings.logs, live=live, columns=columns())
        interrupts: list[KeyboardInterrupt] = []
        while True:
            try:
                self._show_until_end(console)
                break
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)
                if len(interrupts) > 2:  # noqa: PLR2004 - the third
                    raise
                self.cancel(now=len(interrupts) > 1)
        if interrupts:
            raise interrupts[0]
        return self.result()

    def _show_until_end(self, console: Console) -> None:
        while not (self.done() and self._events.empty()):
            pieces: list[Piece] = []
            try:
                event = self._events.get(timeout=_REDRAW_SECONDS)
            except queue.Empty:
                event = None
            if isinstance(event, str):
                pieces += console.note(event)
            elif event is not None:
                self._backlog -= len(event[2])
                pieces += console.feed(*event)
            show([*pieces, *console.tick(time.monotonic())])
        show(console.close())
        show(_closing_notes(console, self._dropped, self._plan.directory.logs))

    def _note(self, text: str, *, warn: bool = False) -> None:
        if self._display:
            self._events.put(text)
        elif warn:
            logger.warning(text)

    def _listen(self) -> None:
        """Follow the agent to the end, then settle everything; runs in a thread of its own."""
        plan = self._plan
        status: str = "FAILED"
        self._note(_opening(plan, self._agents.job_id))
        try:
            ended = self._run()
            if ended["leftovers"]:
                self._note(f"processes {ended['leftovers']} withstand SIGKILL (stuck in the kernel); they were left")
            self._results = collect(ended, plan.directory, timeout=plan.settings.timeout)
            status = "FINISHED"
        except LaunchCancelledError as error:
            self._error, status = error, "KILLED"
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that asks for the result
            # Where this thread put it together tells nobody anything; the rank's own traceback is its cause.
            self._error = error.with_traceback(None) if hasattr(error, "launch") else error
        self._agents.share(lambda: dump(self._results, self._error))
        self._agents.close(_AGENT_EXIT_SECONDS if self._agents.channel is not None else 0)
        seconds = time.monotonic() - self._started
        plan.directory.remove_empty_logs()
        if self._error is None:
            plan.directory.remove_data()
        else:
            first = textwrap.shorten(str(self._error).strip().partition("\n")[0], 160, placeholder=" …")
            self._note(f"{plan.name} failed after {seconds:.1f} s: {type(self._error).__name__}: {first}")
        if plan.run is not None:
            tags = {"world_size": str(self._world_size or 0), "restarts": str(self._attempt)} | self._nodes.tags()
            if failures := getattr(getattr(self._error, "launch", None), "failures", ()):
                tags |= {"failed_rank": str(failures[0].rank), "failure": failures[0].summary[:250]}
            plan.run.finish(status, tags=tags, logs=plan.directory.logs)  # type: ignore[arg-type]
        self._ended.set()
        self._events.put(None)
        atexit.unregister(self._at_exit)

    def _run(self) -> dict[str, Any]:
        """Follow the agents to their last message, and those that come in their place when a node was taken away."""
        while True:
            ended = self._follow_or_lose()
            lost = isinstance(ended, AgentDiedError) or ended["reason"] == "lost"
            taken = not isinstance(ended, AgentDiedError) and ended["reason"] == "terminated"
            if (lost or taken) and self._again("a node was lost" if lost else "a node was taken away"):
                continue
            if self._lost is not None and (taken or isinstance(ended, AgentDiedError)):
                raise self._lost
            if isinstance(ended, AgentDiedError):
                raise ended
            return ended

    def _follow_or_lose(self) -> dict[str, Any] | AgentDiedError:
        try:
            return self._follow()
        except AgentDiedError as error:
            return error

    def _again(self, reason: str) -> bool:
        settings, attempt = self._plan.settings, self._attempt + 1
        left = None if settings.timeout is None else settings.timeout - (time.monotonic() - self._started)
        if self._cancelled or attempt > settings.max_restarts or (left is not None and left <= 0):
            return False
        if not self._agents.again(attempt=attempt, timeout=left):
            return False
        self._attempt, self._lost = attempt, None
        self._note(f"{reason}; starting again, {attempt} of {settings.max_restarts} restarts")
        return True

    def _follow(self) -> dict[str, Any]:
        """Take the messages of node 0's agent until its last; the last is returned."""
        agents = self._agents
        with selectors.DefaultSelector() as selector:
            for served in agents.waits():
                selector.register(served, selectors.EVENT_READ)
            while (channel := agents.channel) is None or not channel.closed:
                if channel is not None and channel not in selector.get_map():
                    selector.register(channel, selectors.EVENT_READ)
                # A process that was forked meanwhile may hold the agent's end open, so the channel alone cannot tell;
                # and a suspended caller wakes with its wait expired, the agent gone, and its last words still to read.
                alive = agents.alive()
                ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS) or selector.select(0)]
                if not (ready or alive):
                    break
                for message in channel.receive() if channel is not None and channel in ready else ():
                    if message["kind"] == "ended":
                        self._world_size = len(message["ranks"]) or self._world_size
                        return message
                    self._on_message(message)
                with self._sending:
                    agents.serve()
                if self._cancelled and agents.channel is None:
                    raise LaunchCancelledError("the launch was cancelled before its nodes had come")
        self._sweep()
        raise AgentDiedError(
            f"the agent of {self._plan.name} died ({agents.words() or 'it left no word'}), and its ranks with it; "
            f"logs: {self._plan.directory.logs}"
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "log":
            size = len(message["data"])
            if self._backlog > _BACKLOG_BYTES:
                self._dropped += size
            else:
                self._backlog += size
                self._events.put((message["rank"], message["stream"], message["data"]))
        elif kind == "file":
            self._plan.directory.put(message["name"], message["offset"], message["data"])
        elif kind == "lost":
            self._lost = self._lost or NodeLostError(message["text"], node=message["node"], host=message["host"])
        elif kind == "node":
            self._nodes.add(message)
        elif kind == "started":
            self._attempt = message["attempt"]
            if self._plan.engine.local:  # elsewhere these numbers are other processes
                self._sessions.update(message["pids"])
            for text in self._nodes.report():
                self._note(text, warn=True)
        elif kind == "restarting":
            self._note(
                f"rank {message['rank']} failed ({message['summary']}); starting again, "
                f"{message['attempt']} of {self._plan.settings.max_restarts} restarts"
            )

    def _sweep(self) -> None:
        """End what a killed agent has left: the kernel ended the ranks, their children are in the ranks' sessions."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        while (left := processes.session_members(self._sessions)) and time.monotonic() < deadline:
            processes.kill(left)
            time.sleep(0.01)

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


def _closing_notes(console: Console, dropped: int, logs: Path) -> list[Piece]:
    pieces: list[Piece] = []
    if console.hidden_lines:
        pieces += console.note(f"{console.hidden_lines} lines of other ranks not shown (logs='all' shows them): {logs}")
    if dropped:
        pieces += console.note(f"{dropped} bytes of output came too fast to show; they are in {logs}")
    return pieces
