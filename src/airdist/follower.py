"""The agent of any node but the first: does what the leader says, and tells it what happens here.

It says `node` (or `refused`), `started`, `rank` (a rank has come further), `log`, `file`, `stacks`, `cleared`, `beat`
and `terminated` (somebody asked this agent to end). What a rank has delivered is told once its file has been handed
over. Without its leader it ends its ranks and itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from airdist.pulse import Pulse
from airdist.supervisor import ORPHAN_GRACE_SECONDS, Supervisor
from airdist.world import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.channel import Channel
    from airdist.mirror import Mirror
    from airdist.rundir import RunDirectory
    from airdist.spec import AgentSpec

__all__ = ["Follower"]


class Follower(Supervisor):
    """Serves the ranks of one node for a leader on another.

    Args:
        node: rank of this node.
    """

    _mirror: Mirror

    def __init__(
        self,
        spec: AgentSpec,
        owner: Channel,
        directory: RunDirectory,
        environ: Mapping[str, str],
        *,
        mirror: Mirror,
        node: int,
    ) -> None:
        super().__init__(spec, owner, directory, environ, mirror)
        self._rank = node
        self._pulse = Pulse(owner, spec.heartbeat)
        self._told: dict[int, dict[str, Any]] = {}
        self._attempt = 0
        self._stacks = self._clearing = self._dismissed = self._terminated = False

    def take(self, message: dict[str, Any]) -> None:
        """Do what the leader says."""
        kind = message["kind"]
        if kind == "start":
            self._start(message)
        elif kind == "release":
            self._node.release(terminate=message["terminate"])
        elif kind == "stacks":
            self._node.dump_stacks()
            self._stacks = True
        elif kind == "clear":
            self._clearing = True
        elif kind == "flow":
            self._mirror.open = message["open"]
            self._node.show = message["open"] and self._spec.forward_logs
        elif kind == "bye":
            self._dismissed = True

    def run(self) -> bool:
        """Obey until the leader lets go or is gone; whether everything has been delivered."""
        self._watch()
        while True:
            self._pump(lambda: self._abandoned or self._dismissed or self._clearing, None)
            if self._clearing and not self._abandoned:
                leftovers = self._clear()
                self._deliver()
                self._report()
                self._owner.send("cleared", leftovers=leftovers)
                self._clearing = False
            elif self._dismissed or self._abandoned:
                break
        if not self._node.gone:
            self._node.release(terminate=True)
            self._pump(lambda: self._node.gone, ORPHAN_GRACE_SECONDS)
        self._clear()  # ranks that have ended by themselves may have left children too
        return self._dismissed

    def _start(self, message: dict[str, Any]) -> None:
        self._attempt = message["attempt"]
        self._told = {}
        address = (self._owner.addresses[1], message["port"])
        self._node.start(
            Place(self._attempt, self._rank, self._spec.nodes, message["first"], message["world_size"], address)
        )
        self._follow_logs(self._attempt)

    def _serve(self) -> None:
        super()._serve()
        self._report()
        if self._terminated:
            self._terminated = False
            self._owner.send("terminated")
        self._pulse.beat()
        if self._pulse.lost():
            self._lose_owner()

    def _report(self) -> None:
        """Tell how far the ranks have come, as far as the files that prove it are on their way."""
        for rank in self._node.ranks:
            report = rank.report()
            if report == self._told.get(rank.rank):
                continue
            if rank.outcome is None or self._mirror.done(self._directory.result(rank.rank, self._attempt)):
                self._told[rank.rank] = report
                age = max(0.0, time.monotonic() - rank.at) if rank.at else 0.0
                self._owner.send("rank", report=report, age=age)
        if self._stacks and self._node.stacks_complete():
            self._stacks = False
            self._owner.send("stacks")

    def _on_terminate(self) -> None:
        self._terminated = True  # a signal handler must not send in the middle of another message

    def _on_owner_lost(self) -> None:
        if not self._abandoned:
            print(f"node {self._rank}: the agent of node 0 is gone; ending the ranks here", flush=True)
        super()._on_owner_lost()
