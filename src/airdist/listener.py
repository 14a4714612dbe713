"""The caller's ear: follows the agents of a launch to their last message, over restarts and lost nodes.

agents ── log, file, node, started, restarting, lost ──► Listener ──► display, run directory, facts of the launch
── ended ──────────────────────────────────────► returned
"""

from __future__ import annotations

import selectors
import threading
import time
from typing import TYPE_CHECKING, Any

from airdist import processes
from airdist.errors import AgentDiedError, LaunchCancelledError, NodeLostError
from airdist.nodes import Nodes

if TYPE_CHECKING:
    from airdist.display import Display
    from airdist.engines.base import Agents
    from airdist.plan import Plan

__all__ = ["Listener"]

_SWEEP_SECONDS = 5.0
_POLL_SECONDS = 0.5


class Listener:
    """Moves one launch forward, in one thread; `cancel` may come from any other.

    Attributes:
        attempt: the attempt under way, from 0.
        world_size: number of ranks, None while it is not known.
        nodes: what the nodes have said of themselves.
    """

    def __init__(self, plan: Plan, agents: Agents, display: Display) -> None:
        self.attempt = 0
        self.world_size = plan.world_size
        self.nodes = Nodes(plan.withheld)
        self._plan = plan
        self._agents = agents
        self._display = display
        self._since: float | None = None  # when the present agents had come
        self._spent = 0.0  # seconds for which there were agents before them
        self._sessions: set[int] = set()
        self._cancelled = False
        self._lost: NodeLostError | None = None
        self._sending = threading.Lock()

    def cancel(self, *, now: bool) -> None:
        """Ask the agents to end the ranks, within their grace or at once."""
        self._cancelled = True
        with self._sending:
            if self._agents.channel is not None:
                self._agents.channel.send("kill" if now else "stop")

    def follow(self) -> dict[str, Any]:
        """Follow the agents to their last message, and those that come in their place when a node was taken away."""
        while True:
            ended = self._follow_or_lose()
            lost = isinstance(ended, AgentDiedError) or ended["reason"] == "lost"
            taken = not isinstance(ended, AgentDiedError) and ended["reason"] == "terminated"
            if (lost or taken) and self._again("a node was lost" if lost else "a node was taken away"):
                continue
            if isinstance(ended, AgentDiedError):
                raise self._lost or ended
            # Where there are ranks already, those of the lost node tell of it, with all that the launch has left.
            if self._lost is not None and (taken or (lost and not ended["ranks"])):
                raise self._lost
            return ended

    def _follow_or_lose(self) -> dict[str, Any] | AgentDiedError:
        try:
            return self._hear()
        except AgentDiedError as error:
            return error

    def _again(self, reason: str) -> bool:
        settings, attempt = self._plan.settings, self.attempt + 1
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None
        # What a scheduler lets a launch wait for its machines is no time of the launch.
        left = None if settings.timeout is None else settings.timeout - self._spent
        if self._cancelled or attempt > settings.max_restarts or (left is not None and left <= 0):
            return False
        if not self._agents.again(attempt=attempt, timeout=left):
            return False
        self.attempt, self._lost = attempt, None
        self._display.note(f"{reason}; starting again, {attempt} of {settings.max_restarts} restarts")
        return True

    def _hear(self) -> dict[str, Any]:
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
                        self.world_size = len(message["ranks"]) or self.world_size
                        return message
                    self._take(message)
                with self._sending:
                    agents.serve()
                if self._cancelled and agents.channel is None:
                    raise LaunchCancelledError("the launch was cancelled before its nodes had come")
        self._sweep()
        raise AgentDiedError(
            f"the agent of {self._plan.name} died ({agents.words() or 'it left no word'}), and its ranks with it; "
            f"logs: {self._plan.directory.logs}"
        )

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if self._since is None:  # the first word, which is `node` of node 0 or, on one machine, `started`
            self._since = time.monotonic()
        if kind == "log":
            self._display.put(message["rank"], message["stream"], message["data"])
        elif kind == "file":
            self._plan.directory.put(message["name"], message["offset"], message["data"])
        elif kind == "lost":
            self._lost = self._lost or NodeLostError(message["text"], node=message["node"], host=message["host"])
        elif kind == "node":
            self.nodes.add(message)
        elif kind == "started":
            self.attempt = message["attempt"]
            if self._plan.engine.local:  # elsewhere these numbers are other processes
                self._sessions.update(message["pids"])
            for text in self.nodes.report():
                self._display.note(text, warn=True)
        elif kind == "restarting":
            self._display.note(
                f"rank {message['rank']} failed ({message['summary']}); starting again, "
                f"{message['attempt']} of {self._plan.settings.max_restarts} restarts"
            )

    def _sweep(self) -> None:
        """End what a killed agent has left: the kernel ended the ranks, their children are in the ranks' sessions."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        while (left := processes.session_members(self._sessions)) and time.monotonic() < deadline:
            processes.kill(left)
            time.sleep(0.01)
