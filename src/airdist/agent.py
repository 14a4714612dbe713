"""The agent: the process on each node that starts the ranks there, watches them and its owner, and ends them.

    one machine     caller ── inherited socket ──> agent of node 0 ──> ranks
    many            caller <── TCP ── agent of node 0 (leads) <── TCP ── agents of the other nodes (follow)

It is a process of its own so that no rank outlives its launch: it notices that its owner is gone when the channel to
it ends, the kernel ends its ranks when it dies itself, and being single-threaded it may ask the kernel for that. It
imports the standard library only, installs its signal handlers in its own process instead of the caller's, and the one
that leads holds the deadline, which a suspended or busy caller must not extend.

The first message of the owner is an `airdist.spec.AgentSpec`. What follows is the conversation of `airdist.leader` with
the caller and of `airdist.follower` with the leader.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from airdist import processes
from airdist.channel import Channel
from airdist.leader import Leader
from airdist.rundir import RunDirectory
from airdist.spec import spec_of

__all__ = ["main"]


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
    sys.stdout.flush()
    os._exit(0)  # the caller waits for this end, and taking the interpreter apart takes it 10 ms longer


if __name__ == "__main__":
    main()
