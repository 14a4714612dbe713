"""The agent of node 0: decides for all nodes when an attempt starts and ends, and tells the caller how it went.

To the caller it says `started`, `log`, `file`, `nodes`, `restarting`, `beat` and, last, `ended`; the caller may say
`stop` (end the ranks within their grace) and `kill` (end them now). A launch on one machine is the case without peers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airdist import processes
from airdist.environ import LAUNCH_RUN_ID, network_defaults
from airdist.peers import Peers
from airdist.pulse import Pulse
from airdist.supervisor import ORPHAN_GRACE_SECONDS, Supervisor
from airdist.world import Place, RankState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.channel import Channel
    from airdist.link import Door
    from airdist.mirror import Mirror
    from airdist.rundir import RunDirectory
    from airdist.spec import AgentSpec

__all__ = ["Leader"]

_SETTLE_SECONDS = 0.25  # peers of a failed rank that are about to fail by themselves get to say so
_TAKEN_SECONDS = 2.0  # between the ends of a rank and of its agent, when both were asked
_FINISH_SECONDS = 600.0  # to run exit handlers once every value has been delivered: the last save may be under way
_FAILURE_GRACE_SECONDS = 2.0  # peers of a failed rank are most likely stuck in a collective
_STOP_GRACE_SECONDS = 10.0
_STACKS_SECONDS = 1.0
_TRACKING_SECONDS = 30.0  # to import MLflow on a busy machine, and say one thing to its server
_LOCALHOST = "127.0.0.1"


class Leader(Supervisor):
    """Runs one spec to its end, on all nodes.

    Args:
        door: where the agents of the other nodes call; None without any.
        about: what this node has to say of itself, on another machine than the caller's.
    """

    def __init__(
        self,
        spec: AgentSpec,
        owner: Channel,
        directory: RunDirectory,
        environ: Mapping[str, str],
        *,
        mirror: Mirror | None = None,
        door: Door | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        environ = dict(environ)
        super().__init__(spec, owner, directory, environ, mirror)
        self._environ = environ
        self._peers = Peers(spec, door, self._selector, owner, directory)
        self._about = about
        self._beat = Pulse(owner, spec.heartbeat)
        self._deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
        self._stop: str | None = None
        self._kill = False
        self._ending = False

    def take(self, message: dict[str, Any]) -> None:
        """Do what the caller says: `stop` or `kill`."""
        if message["kind"] in {"stop", "kill"}:
            self._stop = self._stop or "cancelled"
            self._kill = self._kill or message["kind"] == "kill"

    def run(self) -> None:
        """Run attempts until one ends otherwise than by the failure of a rank, or none is left."""
        self._watch()
        attempt, reason, leftovers = self._spec.attempt, self._gather(), list[int]()
        while reason is None:
            reason, leftovers = self._attempt(attempt)
            expired = self._deadline is not None and time.monotonic() >= self._deadline
            if reason != "failed" or self._stop or expired or attempt >= self._spec.max_restarts:
                break
            if self._peers.lost:
                reason = "lost"  # whoever starts agents may start others; these cannot
                break
            attempt, reason = attempt + 1, None
            failed = min((rank for rank in self._ranks() if rank.failed), key=lambda rank: rank.at)
            self._owner.send("restarting", attempt=attempt, rank=failed.rank, summary=failed.summary)
        self._deliver()
        self._owner.send(
            "ended",
            reason=reason,
            attempt=attempt,
            leftovers=leftovers,
            ranks=[rank.report() for rank in self._ranks()],
            nodes=self._spec.nodes,
            absent=self._peers.absent,
            refused=self._peers.refused,
            taken=self._peers.terminated,
        )
        self._deliver()
        self._peers.dismiss()
        if reason == "abandoned":
            self._end_tracking()

    def _ranks(self) -> list[RankState]:
        return sorted([*self._node.ranks, *self._peers.ranks], key=lambda rank: rank.rank)

    def _failed(self) -> bool:
        return any(rank.failed for rank in self._ranks())

    def _taken(self) -> bool:
        return self._stop == "terminated"

    def _delivered(self) -> bool:
        return all(rank.outcome == "value" for rank in self._ranks())

    def _settled(self) -> bool:
        return all(rank.settled for rank in self._ranks())

    def _gone(self) -> bool:
        return all(rank.gone for rank in self._ranks())

    def _end_tracking(self) -> None:
        """Have the MLflow run ended, which the caller would have done, in a process that may import MLflow."""
        if LAUNCH_RUN_ID in self._environ:
            command = [sys.executable, *processes.program("airdist.tracking.run", "end_abandoned")]
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(command, timeout=_TRACKING_SECONDS, check=False, env=self._environ)

    def _gather(self) -> str | None:
        """Wait for the other nodes; why there is no use in starting, or None."""
        if self._about is not None:
            self._owner.send("node", node=0, **self._about)
        peers = self._peers
        self._pump(lambda: self._stop or peers.complete or peers.refused or peers.lost, self._spec.start_timeout)
        if self._stop:
            return self._stop
        if peers.refused:
            return "refused"
        if peers.lost:
            return "lost"
        if not peers.complete:
            return "absent"
        if peers.address is not None:
            from airdist.link import interface_of  # noqa: PLC0415 - its digests cost a launch on one machine 30 ms

            # The user's own choice, which is in the environment already, comes last and so wins.
            defaults = network_defaults(interface_of(peers.address))
            self._environ |= {name: value for name, value in defaults.items() if name not in self._environ}
        return None

    def _attempt(self, attempt: int) -> tuple[str, list[int]]:
        self._start(attempt)
        remaining = None if self._deadline is None else self._deadline - time.monotonic()
        self._pump(lambda: self._stop or self._failed() or self._delivered(), remaining)
        grace = _STOP_GRACE_SECONDS
        if self._stop:
            reason = self._stop
        elif self._failed():
            reason, grace = "failed", _FAILURE_GRACE_SECONDS
            self._pump(lambda: self._stop or self._settled(), _SETTLE_SECONDS)
            if self._mirror is not None and any(rank.returncode == -signal.SIGTERM for rank in self._ranks()):
                # A scheduler that takes a node away asks all its processes to end, in no order.
                self._pump(lambda: self._stop or self._peers.lost, _TAKEN_SECONDS)
            if self._taken():
                reason, grace = "terminated", _STOP_GRACE_SECONDS
        elif self._delivered():
            reason = "finished"
        else:
            reason = "timeout"
            self._node.dump_stacks()
            self._peers.dump_stacks()
            self._pump(
                lambda: self._stop or (self._node.stacks_complete() and self._peers.stacks_complete), _STACKS_SECONDS
            )
            if self._delivered():  # they came in meanwhile; hours of work are not to be lost by a fraction of a second
                reason = "finished"
        return reason, self._end(reason, grace if self._spec.grace is None else self._spec.grace)

    def _start(self, attempt: int) -> None:
        """Start all ranks of an attempt, around a store address on which a socket listens already."""
        # The port is never free between its choice and its use: the socket itself is handed to rank 0
        # (pytorch/pytorch#85604 and many more chose a port first and found it taken later).
        address, world_size = self._peers.address, self._node.nprocs + self._peers.nprocs
        with socket.create_server(
            (_LOCALHOST if address is None else "", 0), backlog=max(128, 4 * world_size)
        ) as listener:
            port = listener.getsockname()[1]
            self._peers.start(attempt, first=self._node.nprocs, world_size=world_size, port=port)
            place = Place(attempt, 0, self._spec.nodes, 0, world_size, (address or _LOCALHOST, port))
            self._node.start(place, listener)
        self._follow_logs(attempt)

    def _end(self, reason: str, grace: float) -> list[int]:
        """Let delivered ranks go, ask the others to end, then end whatever is left; return the pids that withstood."""
        self._ending = True
        if self._owner.closed:
            grace = min(grace, ORPHAN_GRACE_SECONDS)
        self._peers.release(terminate=reason != "finished")
        self._node.release(terminate=reason != "finished")
        self._pump(lambda: self._kill or self._gone(), _FINISH_SECONDS if reason == "finished" else grace)
        self._peers.clear()
        left = self._clear()
        self._pump(lambda: self._peers.cleared, None)
        self._ending = False
        return left + self._peers.leftovers

    def _serve(self) -> None:
        super()._serve()
        self._peers.serve()
        if self._peers.terminated:
            self._on_terminate()
        if self._mirror is not None:
            self._beat.beat()

    def _on_terminate(self) -> None:
        # On the caller's own machine that is somebody's wish; elsewhere it is the way of schedulers to take a node.
        self._stop = self._stop or ("cancelled" if self._mirror is None else "terminated")

    def _on_owner_lost(self) -> None:
        if not self._stop:
            print(f"{os.path.basename(self._spec.run_dir)}: the caller is gone; ending its ranks", flush=True)
        self._stop = self._stop or "abandoned"
        self._kill = self._kill or self._ending  # the ranks know already, and nobody waits for them any more
