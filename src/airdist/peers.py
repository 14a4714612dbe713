"""The other nodes as the leader knows them: who has come, how far their ranks are, and who has disappeared.

Each agent of another node calls at the leader's door, says which node it is, gets the spec and the payload, and says
that it is ready or why it is not. From then on it obeys (`start`, `release`, `stacks`, `clear`) and reports; its logs
and files pass through on their way to the caller. What a follower says is in `airdist.follower`.
"""

from __future__ import annotations

import os
import selectors
import time
from typing import TYPE_CHECKING, Any

from airdist.mirror import Mirror
from airdist.pulse import Pulse
from airdist.world import RankState

if TYPE_CHECKING:
    from airdist.channel import Channel
    from airdist.link import Door
    from airdist.rundir import RunDirectory
    from airdist.spec import AgentSpec

__all__ = ["Peers"]

_HOLD_BYTES = 8 << 20  # on their way to a caller that is not reading: the other nodes are to keep theirs for now
_PASSED_ON = frozenset({"log", "file", "started", "node"})


class _Peer:
    """One other node."""

    def __init__(self, node: int, host: str, channel: Channel, pulse: Pulse, payload: Mirror) -> None:
        self.node = node
        self.host = host
        self.channel = channel
        self.pulse = pulse
        self.payload = payload
        self.nprocs: int | None = None
        self.ranks: dict[int, RankState] = {}
        self.lost = ""
        self.stacks = False
        self.clear = False


class Peers:
    """All other nodes of a launch.

    Args:
        spec: what they are to run.
        door: where they call; None without any.
        selector: that of the leader.
        owner: where their logs and files go.
        directory: the leader's run directory, which holds the payload.
    """

    def __init__(
        self,
        spec: AgentSpec,
        door: Door | None,
        selector: selectors.BaseSelector,
        owner: Channel,
        directory: RunDirectory,
    ) -> None:
        self._spec = spec
        self._selector = selector
        self._owner = owner
        self._directory = directory
        self._peers: dict[int, _Peer] = {}
        self._holding = False
        self.refused: list[dict[str, Any]] = []
        self.leftovers: list[int] = []
        self.terminated = ""
        self._door = door
        if door is not None:
            selector.register(door, selectors.EVENT_READ, self._on_door)

    @property
    def complete(self) -> bool:
        """Whether every node is there and ready."""
        return not self.absent

    @property
    def absent(self) -> list[int]:
        """Which nodes have not come, or have not said that they are ready."""
        ready = {peer.node for peer in self._peers.values() if peer.nprocs is not None}
        return [node for node in range(1, self._spec.nodes) if node not in ready]

    @property
    def address(self) -> str | None:
        """This machine's address as the others reach it; None without others."""
        return next((peer.channel.addresses[0] for peer in self._peers.values() if not peer.channel.closed), None)

    @property
    def nprocs(self) -> int:
        """Ranks on all other nodes."""
        return sum(peer.nprocs or 0 for peer in self._peers.values())

    @property
    def ranks(self) -> list[RankState]:
        """All ranks on other nodes, of the present attempt."""
        return [rank for peer in self._peers.values() for rank in peer.ranks.values()]

    @property
    def lost(self) -> bool:
        """Whether a node has disappeared."""
        return any(peer.lost for peer in self._peers.values())

    @property
    def stacks_complete(self) -> bool:
        """Whether every node has written down the stacks of its ranks."""
        return all(peer.stacks or peer.lost for peer in self._peers.values())

    @property
    def cleared(self) -> bool:
        """Whether no process of a rank is left anywhere, and every file has come."""
        return all(peer.clear or peer.lost for peer in self._peers.values())

    def start(self, attempt: int, *, first: int, world_size: int, port: int) -> None:
        """Start the ranks of an attempt, in the order of the nodes."""
        for _, peer in sorted(self._peers.items()):
            assert peer.nprocs is not None
            peer.ranks = {rank: RankState(rank, peer.node, peer.host) for rank in range(first, first + peer.nprocs)}
            peer.stacks = peer.clear = False
            peer.channel.send("start", attempt=attempt, first=first, world_size=world_size, port=port)
            first += peer.nprocs
            self._mark_lost(peer)  # one that has gone meanwhile is a failure of this attempt

    def release(self, *, terminate: bool) -> None:
        """As `Node.release`, everywhere."""
        for peer in self._peers.values():
            peer.channel.send("release", terminate=terminate)
            for rank in peer.ranks.values():
                rank.stopped = rank.stopped or (terminate and not rank.settled)

    def dump_stacks(self) -> None:
        """As `Node.dump_stacks`, everywhere."""
        for peer in self._peers.values():
            peer.channel.send("stacks")

    def clear(self) -> None:
        """Have every process that is left ended, everywhere."""
        for peer in self._peers.values():
            peer.channel.send("clear")

    def dismiss(self) -> None:
        """Let the agents of the other nodes go; all has been delivered."""
        for peer in self._peers.values():
            peer.channel.send("bye")

    def serve(self) -> None:
        """What is due at every turn: callers, heartbeats, the payload, output held back or not, and who is lost."""
        self._on_door()
        holding = self._owner.pending > _HOLD_BYTES
        for peer in self._peers.values():
            if peer.lost:
                continue
            if holding != self._holding:
                peer.channel.send("flow", open=not holding)
            peer.payload.pump()
            peer.pulse.beat()
            # One that is still looking at its devices is not judged by its silence but by the time to start.
            if peer.pulse.lost() and (peer.channel.closed or peer.nprocs is not None):
                how = "hung up: its agent has died" if peer.channel.closed else "has not been heard of for "
                peer.lost = f"node {peer.node} ({peer.host}) {how}"
                if not peer.channel.closed:
                    peer.lost += f"{self._spec.heartbeat:g} s"
                self._drop(peer.channel)
                self._mark_lost(peer)
                # At once: a scheduler that ends a job for the loss of a node may not leave us the time for an `ended`.
                self._owner.send("lost", node=peer.node, host=peer.host, text=peer.lost)
            else:
                write = selectors.EVENT_WRITE if peer.channel.pending else 0
                self._selector.modify(
                    peer.channel, selectors.EVENT_READ | write, self._selector.get_key(peer.channel).data
                )
        self._holding = holding

    @staticmethod
    def _mark_lost(peer: _Peer) -> None:
        if peer.lost:
            for rank in peer.ranks.values():
                if rank.returncode is None:
                    rank.lost = peer.lost
                if rank.failed and not rank.summary:
                    rank.summary, rank.at = peer.lost, time.monotonic()

    def _on_door(self) -> None:
        for channel in () if self._door is None else self._door.admit():
            os.set_blocking(channel.fileno(), False)
            self._selector.register(
                channel, selectors.EVENT_READ, lambda channel=channel: self._on_newcomer(channel, channel.receive())
            )

    def _on_newcomer(self, channel: Channel, messages: list[dict[str, Any]]) -> None:
        if not messages:
            if channel.closed:
                self._drop(channel)
            return
        node, host = int(messages[0].get("node", 0)), str(messages[0].get("host"))
        if messages[0]["kind"] != "hello" or node in self._peers or node not in range(1, self._spec.nodes):
            self._drop(channel)  # a straggler of another attempt to start this node
            return
        payload = Mirror(self._directory.path, channel)
        peer = _Peer(node, host, channel, Pulse(channel, self._spec.heartbeat), payload)
        self._peers[node] = peer
        self._selector.modify(channel, selectors.EVENT_READ, lambda: self._on_peer(peer))
        channel.send("spec", payload=self._directory.payload.stat().st_size, **self._spec._asdict())
        payload.follow(self._directory.payload)

    def _on_peer(self, peer: _Peer) -> None:
        peer.channel.flush()
        for message in peer.channel.receive():
            self._take(peer, message)
        # A closed channel is noticed, and put into words, by `serve`; until then it must not wake the selector.
        if peer.channel.closed:
            self.serve()

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "node":
            peer.nprocs = message["nprocs"]
        if kind in _PASSED_ON:
            self._owner.send(**message)
        elif kind == "rank":
            report = message["report"]
            report["at"] = time.monotonic() - message["age"]  # clocks of two machines have nothing in common
            if (rank := peer.ranks.get(report["rank"])) is not None:
                report["stopped"] = report["stopped"] or (rank.stopped and report["outcome"] is None)
                peer.ranks[rank.rank] = RankState(**report)
        elif kind == "refused":
            self.refused.append({"node": peer.node, "host": peer.host, **message})
        elif kind == "stacks":
            peer.stacks = True
        elif kind == "cleared":
            peer.clear = True
            self.leftovers += message["leftovers"]
        elif kind == "terminated":
            self.terminated = self.terminated or f"node {peer.node} ({peer.host})"

    def _drop(self, channel: Channel) -> None:
        if channel in self._selector.get_map():
            self._selector.unregister(channel)
        channel.close()
