"""Agents on other machines: they are started by an engine's own means, and call back.

    spawn(command) ── the engine's way to run one process on each node ──> python … airdist.arrival:main
    gate: Door  <── "I am node 0, and listen at …" ── agent of node 0, which stays on the line as the leader
                <── "I am node k" ── the others; they are told where node 0 listens, and hang up

Nodes call the caller, and not the other way round, because that is what works where jobs are started: `srun`, Ray and
Spark all need a way from the nodes to the process that started them. Only node 0 keeps its connection, so that a caller
has one peer however many nodes there are, and a node's end is noticed within the cluster.
"""

from __future__ import annotations

import os
import secrets
import selectors
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from airdist.engines.command import COMMON_OPTIONS, AgentCommand, Meeting, Spawned
from airdist.errors import AgentDiedError, LaunchError, NodeLostError
from airdist.link import Door, own_addresses
from airdist.mirror import Mirror
from airdist.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.channel import Channel
    from airdist.engines.base import HasFileno, Order

__all__ = ["COMMON_OPTIONS", "AgentCommand", "Meeting", "RemoteAgents", "RemoteEngine", "Spawned"]

_QUEUE_SECONDS = 24 * 3600.0
_SHARE_SECONDS = 30.0  # without a guest taking anything, for all guests together


class RemoteEngine(ABC):
    """Starts agents on other machines.

    Attributes:
        keys: names of the engine's own `engine_options`, besides those that all engines have; None: any.
    """

    name: ClassVar[str]
    local: ClassVar[bool] = False
    keys: ClassVar[frozenset[str] | None] = frozenset()

    @property
    def meeting(self) -> Meeting:
        """Where and how agents call; everything of it is new for each launch unless somebody else has agreed on it."""
        return Meeting()

    def check(self, *, nodes: int, options: Mapping[str, Any]) -> None:  # noqa: ARG002 - for engines that know more
        """Refuse options that do not exist."""
        if self.keys is not None and (unknown := sorted(set(options) - self.keys - COMMON_OPTIONS)):
            raise LaunchError(
                f"engine_options: {', '.join(unknown)}: engine={self.name!r} has "
                f"{', '.join(sorted(self.keys | COMMON_OPTIONS))}"
            )

    def start(self, order: Order) -> RemoteAgents:
        """Open the door, and have agents started."""
        return RemoteAgents(self, order)

    @abstractmethod
    def spawn(self, command: AgentCommand) -> Spawned:
        """Start `command.argv(node)` with `command.environ()` on each node, without waiting for it.

        Raises:
            LaunchError: when it is certain already that it cannot be.
        """


class RemoteAgents:
    """The agents of a launch on other machines; see `airdist.engines.base.Agents`."""

    def __init__(self, engine: RemoteEngine, order: Order) -> None:
        self._order = order
        self._spec = order.spec
        meeting = engine.meeting
        secret = meeting.secret or secrets.token_hex(32)
        self._door = Door(secret, port=meeting.port)
        self._command = AgentCommand(
            job=meeting.job or order.job,
            nodes=self._spec.nodes,
            addresses=tuple(f"{host}:{self._door.port}" for host in own_addresses()),
            secret=secret,
            directory=order.directory,
            options={key: value for key, value in order.options.items() if key not in COMMON_OPTIONS},
            seconds=self._spec.start_timeout,
            timeout=self._spec.timeout,
            python=str(order.options.get("python") or sys.executable),
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._channel: Channel | None = None
        self._pulse: Pulse | None = None
        self._patience = 0.0
        self._greeted = 0
        self._payload: Mirror | None = None
        self._host = ""
        self._leader_at: list[tuple[str, int]] = []
        self._waiting: list[Channel] = []
        self._guests: dict[int, Channel] = {}
        self._since = self._asked = time.monotonic()
        try:
            self._spawned = engine.spawn(self._command)
        except BaseException:
            self._door.close()
            raise

    @property
    def channel(self) -> Channel | None:
        """The link to node 0, once its agent has called."""
        return self._channel

    @property
    def job_id(self) -> str | None:
        """What the scheduler calls the job."""
        return self._spawned.job_id

    def waits(self) -> list[HasFileno]:
        """Door and callers, in one descriptor."""
        return [self._selector]  # every selector that operating systems have is a descriptor itself

    def serve(self) -> None:
        """Answer agents that call, send the payload, and notice when nobody comes or nothing is heard any more."""
        for channel in self._door.admit():  # at every turn: those who say nothing are dropped when their time is over
            os.set_blocking(channel.fileno(), False)
            self._selector.register(channel, selectors.EVENT_READ)
        for key, _ in self._selector.select(0):
            if key.fileobj is not self._door and key.fileobj is not self._channel:
                self._hear(key.fileobj)  # type: ignore[arg-type]  # whatever else is registered is a channel
        if self._channel is None:
            self._check_start()
        else:
            self._serve_leader(self._channel)

    def alive(self) -> bool:
        """The channel tells, and `serve` where it does not."""
        return True

    def words(self) -> str:
        """Which machine it was, and what the engine knows."""
        where = f"node 0 ({self._host})" if self._host else ""
        return "; ".join(filter(None, (where, self._spawned.words())))

    def again(self, *, attempt: int, timeout: float | None) -> bool:
        """Let agents come again, if the engine can start them again."""
        if not self._spawned.again():
            return False
        if self._channel is not None:
            if self._channel in self._selector.get_map():
                self._selector.unregister(self._channel)
            self._channel.close()
        self._channel = self._pulse = self._payload = None
        self._leader_at = []
        self._spec = self._spec._replace(attempt=attempt, timeout=timeout)
        self._since = self._asked = time.monotonic()
        return True

    def share(self, outcome: Callable[[], bytes]) -> None:
        """Send the outcome to the processes that take part for other nodes; one that is gone or frozen misses it."""
        data = outcome() if self._guests else b""
        deadline = time.monotonic() + _SHARE_SECONDS
        for guest in self._guests.values():
            with suppress(OSError):
                guest.wait_at_most(max(1.0, deadline - time.monotonic()))
                guest.send("outcome", data=data)

    def close(self, seconds: float) -> None:
        """End what the engine has started, and let nobody in any more."""
        try:
            self._spawned.close(seconds)
        finally:
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not self._door:
                    key.fileobj.close()  # type: ignore[union-attr]  # a channel
            if self._channel is not None:
                self._channel.close()
            self._selector.close()
            self._door.close()

    def _hear(self, channel: Channel) -> None:
        messages = channel.receive()
        if messages and messages[0]["kind"] == "hello" and messages[0]["job"] == self._command.job:
            if "guest" in messages[0]:
                self._guests[messages[0]["guest"]] = channel
                return
            if messages[0]["node"] == 0:
                if self._channel is None:
                    self._welcome(channel, messages[0])
                    return
            else:
                self._waiting.append(channel)
                self._direct()
                return
        if messages or channel.closed:  # a stranger to this launch, or one that hung up
            self._selector.unregister(channel)
            self._waiting = [other for other in self._waiting if other is not channel]
            channel.close()
        for node, guest in list(self._guests.items()):
            if guest is channel:
                del self._guests[node]
                raise NodeLostError(f"the process that took part for node {node} is gone", node=node, host="")

    def _welcome(self, channel: Channel, hello: dict[str, Any]) -> None:
        self._host = hello["host"]
        seen = channel.addresses[1]
        ports = {port for _, port in hello["addresses"]}
        # What this machine sees is the one address that is known to work, unless it is this machine itself.
        known = [(seen, port) for port in ports if not seen.startswith("127.")]
        self._leader_at = list(dict.fromkeys([*known, *((host, port) for host, port in hello["addresses"])]))
        # It takes its orders and looks at its machine before it says more, so its silence is not judged until then.
        self._greeted, self._patience = channel.heard, self._spec.start_timeout
        self._pulse = Pulse(channel, self._patience)
        self._payload = Mirror(self._order.directory, channel)
        payload = self._order.directory / "payload.pkl"
        channel.send("spec", payload=payload.stat().st_size, **self._spec._asdict())
        self._payload.follow(payload)
        self._selector.modify(channel, selectors.EVENT_WRITE)
        self._channel = channel
        self._direct()

    def _direct(self) -> None:
        """Tell those who wait where node 0 is."""
        if self._leader_at:
            for channel in self._waiting:
                channel.send("go", addresses=self._leader_at)
            self._waiting.clear()

    def _serve_leader(self, channel: Channel) -> None:
        assert self._pulse is not None
        assert self._payload is not None
        self._payload.pump()
        channel.flush()
        if not channel.pending and channel in self._selector.get_map():
            self._selector.unregister(channel)  # all is sent; what it says is read by whoever has the channel
        if channel.heard != self._greeted and self._patience != self._spec.heartbeat:
            self._patience = self._spec.heartbeat
            self._pulse = Pulse(channel, self._patience)
        if self._pulse.lost() and not channel.closed:
            raise AgentDiedError(
                f"node 0 ({self._host}) has not been heard of for {self._patience:g} s; the other nodes end alone"
            )

    def _check_start(self) -> None:
        state, now = self._spawned.state(), time.monotonic()
        if state == "ended":
            raise LaunchError(f"no agent has called from node 0: {self._spawned.words() or 'it ended without a word'}")
        if state == "queued":
            limit = float(self._order.options.get("queue_timeout") or _QUEUE_SECONDS)
            if now - self._asked > limit:
                words = self._spawned.words()
                raise LaunchError(f"job {self.job_id} has waited for machines for {limit:g} s (queue_timeout). {words}")
            self._since = now
        elif now - self._since > self._spec.start_timeout:
            waiting = f"; {len(self._waiting)} of the other nodes have" if self._spec.nodes > 1 else ""
            raise LaunchError(
                f"the agent of node 0 has not called within {self._spec.start_timeout:g} s (start_timeout){waiting}. "
                f"It was told to call {', '.join(self._command.addresses)} (AIRDIST_ADDRESS puts another first). "
                f"{self._spawned.words()}"
            )
