"""The agent: the process on each node that starts the ranks there, watches them and its owner, and ends them.

    one machine     caller ── inherited socket ──> agent of node 0 ──> ranks
    many            caller <── TCP ── agent of node 0 (leads) <── TCP ── agents of the other nodes (follow)

It is a process of its own so that no rank outlives its launch: it notices that its owner is gone when the channel to
it ends, the kernel ends its ranks when it dies itself, and being single-threaded it may ask the kernel for that. It
imports the standard library only, installs its signal handlers in its own process instead of the caller's, and the one
that leads holds the deadline, which a suspended or busy caller must not extend.

The first message of the owner is an `AgentSpec`. What follows is the conversation of `airdist.leader` with the caller
and of `airdist.follower` with the leader.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airdist import processes
from airdist.channel import Channel
from airdist.leader import Leader
from airdist.rundir import RunDirectory

__all__ = ["AgentSpec", "main", "spec_of"]


@dataclass(frozen=True)
class AgentSpec:
    """What the agents of a launch are asked to run.

    Attributes:
        run_dir: run directory, which holds the payload; on another machine than the caller's the agent makes one.
        nprocs: ranks to start on this node; None: as many as `request` gives.
        cwd: working directory of the ranks.
        job: name of the launch; "": that of its run directory.
        timeout: seconds from now, over all attempts, or None.
        grace: seconds between asking a rank to end and ending it; None: 10, and 2 after a rank's failure.
        max_restarts: attempts beyond the first.
        attempt: number of the first attempt.
        visible: `CUDA_VISIBLE_DEVICES` of each rank, or None where the ranks share the node's.
        forward_logs: whether the owner wants to see output as it comes.
        owner: pid of the owner where it is this process's parent (the engine knows).
        nodes: number of nodes.
        start_timeout: seconds for all nodes to come together.
        heartbeat: seconds of silence after which a node counts as lost.
        remote: for agents on other machines what they find out or make there themselves; see `airdist.arrival`.
    """

    run_dir: str
    nprocs: int | None
    cwd: str
    job: str = ""
    timeout: float | None = None
    grace: float | None = None
    max_restarts: int = 0
    attempt: int = 0
    visible: list[str] | None = None
    forward_logs: bool = True
    owner: int | None = None
    nodes: int = 1
    start_timeout: float = 300.0
    heartbeat: float = 30.0
    remote: dict[str, Any] | None = None


def spec_of(message: dict[str, Any]) -> AgentSpec:
    """The spec in a message of kind `spec`."""
    return AgentSpec(**{key: value for key, value in message.items() if key != "kind"})


def main() -> None:
    """Entry point on the caller's own machine; the last argument is the agent's end of the owner channel."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    owner = Channel(sock)
    messages: list[dict[str, Any]] = []
    while not messages and not owner.closed:
        messages = owner.receive()
    if messages:
        spec = spec_of(messages[0])
        os.set_blocking(sock.fileno(), False)
        processes.adopt_orphans()
        agent = Leader(spec, owner, RunDirectory(Path(spec.run_dir)), os.environ)
        for message in messages[1:]:  # an owner that changed its mind at once
            agent.take(message)
        agent.run()


if __name__ == "__main__":
    main()
