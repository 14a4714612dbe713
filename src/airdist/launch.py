"""One launch from call to results.

    start_launch ── plan: checks, payload, run directory, MLflow run ── engine ──> agent
         │                                                                         │ started, log, restarting, ended
         └─> Launch ── a thread that listens to the agent and collects <───────────┘

The listening thread alone moves a launch forward, so that an interrupt, which Python raises in the main thread, can
never lose half a message. The thread that waits for the result is also the one that displays output.
"""

from __future__ import annotations

import atexit
import queue
import selectors
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airdist import processes
from airdist.collect import collect
from airdist.errors import AgentDiedError, LaunchCancelledError
from airdist.failure import tail
from airdist.logs import Console, columns, redraws, show
from airdist.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from airdist.logs import Piece
    from airdist.plan import Plan
    from airdist.results import Results
    from airdist.settings import Settings

__all__ = ["Launch", "start_launch"]

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
        self._ended = threading.Event()
        self._results: Results[R] | None = None
        self._error: BaseException | None = None
        self._sending = threading.Lock()
        self._agent = plan.engine.start(plan.spec(forward_logs=self._display), plan.environ())
        atexit.register(self._at_exit)
        threading.Thread(target=self._listen, name=f"airdist-{plan.name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "finished" if self._error is None else f"failed ({self._error!r})"
        return f"<Launch {self._plan.name}: {state}, {self._plan.allocation.nprocs} processes, run_dir={self.run_dir}>"

    def __await__(self) -> Generator[Any, None, Results[R]]:
        """Wait without blocking the event loop."""
        import asyncio  # noqa: PLC0415 - 60 ms of the first launch of everybody who does not await one

        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    @property
    def run_dir(self) -> Path:
        """The run directory, with the logs of all ranks."""
        return self._plan.directory.path

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
        with self._sending:
            self._agent.channel.send("kill" if now else "stop")
        return True

    def logs(self, rank: int = 0) -> str:
        """What a rank has written so far, in the latest attempt."""
        nprocs = self._plan.allocation.nprocs
        if not 0 <= rank < nprocs:
            raise ValueError(f"rank {rank}: there are ranks 0 to {nprocs - 1}")
        path = self._plan.directory.log(rank, self._attempt)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def watch(self) -> Results[R]:
        """Display output until the launch ends, and return its result: what `.distributed()` does.

        An interrupt ends the ranks within their grace and is raised again after that; a second one ends them at once,
        and a third does not wait.
        """
        live = redraws(sys.stdout) or redraws(sys.stderr)
        console = Console(self._plan.allocation.nprocs, self._plan.settings.logs, live=live, columns=columns())
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

    def _note(self, text: str) -> None:
        if self._display:
            self._events.put(text)

    def _listen(self) -> None:
        """Follow the agent to the end, then settle everything; runs in a thread of its own."""
        plan = self._plan
        status: str = "FAILED"
        self._note(_opening(plan))
        try:
            ended = self._follow()
            if ended["leftovers"]:
                self._note(f"processes {ended['leftovers']} withstand SIGKILL (stuck in the kernel); they were left")
            self._results = collect(ended, plan.directory, nprocs=plan.allocation.nprocs, timeout=plan.settings.timeout)
            status = "FINISHED"
        except LaunchCancelledError as error:
            self._error, status = error, "KILLED"
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that asks for the result
            # Where this thread put it together tells nobody anything; the rank's own traceback is its cause.
            self._error = error.with_traceback(None) if hasattr(error, "launch") else error
        self._agent.close(_AGENT_EXIT_SECONDS)
        seconds = time.monotonic() - self._started
        plan.directory.remove_empty_logs()
        if self._error is None:
            plan.directory.remove_data()
        else:
            first = textwrap.shorten(str(self._error).strip().partition("\n")[0], 160, placeholder=" …")
            self._note(f"{plan.name} failed after {seconds:.1f} s: {type(self._error).__name__}: {first}")
        if plan.run is not None:
            tags = {"world_size": str(plan.allocation.nprocs), "restarts": str(self._attempt)}
            if failures := getattr(getattr(self._error, "launch", None), "failures", ()):
                tags |= {"failed_rank": str(failures[0].rank), "failure": failures[0].summary[:250]}
            plan.run.finish(status, tags=tags, logs=plan.directory.logs)  # type: ignore[arg-type]
        self._ended.set()
        self._events.put(None)
        atexit.unregister(self._at_exit)

    def _follow(self) -> dict[str, Any]:
        """Take the agent's messages until its last; the last is returned."""
        channel = self._agent.channel
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            while not channel.closed:
                # A process that was forked meanwhile may hold the agent's end open, so the channel alone cannot tell;
                # and a suspended caller wakes with its wait expired, the agent gone, and its last words still to read.
                alive = self._agent.alive()
                ready = selector.select(_POLL_SECONDS) or selector.select(0)
                if not (ready or alive):
                    break
                for message in channel.receive() if ready else ():
                    if message["kind"] == "ended":
                        return message
                    self._on_message(message)
        self._sweep()
        words = "; ".join(tail(self._plan.directory.agent_log)) or "it left no word"
        raise AgentDiedError(
            f"the agent of {self._plan.name} died ({words}), and its ranks with it; logs: {self._plan.directory.logs}"
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["kind"] == "log":
            data = message["data"].encode("latin-1")
            if self._backlog > _BACKLOG_BYTES:
                self._dropped += len(data)
            else:
                self._backlog += len(data)
                self._events.put((message["rank"], message["stream"], data))
        elif message["kind"] == "started":
            self._attempt = message["attempt"]
            self._sessions.update(message["pids"])
        elif message["kind"] == "restarting":
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


def _opening(plan: Plan) -> str:
    count, kind = plan.allocation.nprocs, plan.allocation.accelerator_type
    what = f"{count} {'process' if count == 1 else 'processes'} on {kind or 'CPU'}"
    link = f"; MLflow run: {plan.run.link}" if plan.run else ""
    return f"{plan.name}: {what}; logs: {plan.directory.logs}{link}"


def _closing_notes(console: Console, dropped: int, logs: Path) -> list[Piece]:
    pieces: list[Piece] = []
    if console.hidden_lines:
        pieces += console.note(f"{console.hidden_lines} lines of other ranks not shown (logs='all' shows them): {logs}")
    if dropped:
        pieces += console.note(f"{dropped} bytes of output came too fast to show; they are in {logs}")
    return pieces
