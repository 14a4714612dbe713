"""Nodes that somebody else has started: a JobSet, `srun` with one task for each node, any allocation.

On every node the same program runs and calls `.distributed()`. The process on node 0 is the caller: it listens on the
port that all have been told, and starts the agent of its node. On node k a process starts the agent of that node, which
calls there like any other, and waits for the outcome, so that all of them return the same.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airdist import processes
from airdist.engines.remote import AgentCommand, Meeting, RemoteEngine
from airdist.environ import SECRET
from airdist.errors import AgentDiedError, LaunchError
from airdist.failure import tail
from airdist.link import LinkError, dial
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.attach import NodeWorld
    from airdist.settings import Settings

__all__ = ["JoinedEngine", "take_part"]

_END_SECONDS = 10.0
_TERMINATE_SECONDS = 30.0  # for an agent to end its ranks within their grace
_calls = itertools.count()
"""Every node makes the same calls in the same order; the number of a call is what its launch is known by."""


def _secret() -> str:
    secret = os.environ.get(SECRET, "")
    if not secret:
        raise LaunchError(
            f"{SECRET} is not set. The nodes of this allocation find each other over the network, and by it they know "
            "each other: give all of them the same random value, such as that of `openssl rand -hex 32`"
        )
    return secret


class JoinedEngine(RemoteEngine):
    """The caller's side, on node 0."""

    name: ClassVar[str] = "joined"

    def __init__(self) -> None:
        from airdist.attach import node_world  # noqa: PLC0415 - which names this engine

        world = node_world(os.environ)
        if world is None:
            raise LaunchError(
                "engine='joined' is for nodes that have been started: set NUM_NODES, NODE_RANK, MASTER_ADDR"
            )
        self._meeting = Meeting(f"call-{next(_calls)}", world.port, _secret())

    @property
    def meeting(self) -> Meeting:
        """As all nodes have been told."""
        return self._meeting

    def spawn(self, command: AgentCommand) -> _Agent:
        """Start the agent of this node; the other nodes start theirs."""
        return _Agent(command)


class _Agent:
    """The agent of node 0, as a child process."""

    job_id: ClassVar[None] = None

    def __init__(self, command: AgentCommand) -> None:
        self._log = RunDirectory(command.directory).agent_log
        self._process = _start(command.argv(0), command.secret, self._log)

    def state(self) -> str:
        """Of the process."""
        return "running" if self._process.poll() is None else "ended"

    def words(self) -> str:
        """The end of its output."""
        return "; ".join(tail(self._log))

    def again(self) -> bool:
        """No: whoever has started the nodes starts them again."""
        return False

    def close(self, seconds: float) -> None:
        """Wait for it; then SIGTERM, by which it ends its ranks first, and at last SIGKILL end it."""
        _end(self._process, seconds)


def take_part(world: NodeWorld, settings: Settings) -> Any:
    """On node k: start the agent of this node, wait for the outcome of the launch, and return or raise it.

    Raises:
        LaunchError: when node 0 cannot be reached in time.
        AgentDiedError: when the process on node 0 has gone.
        Exception: what the launch raised on node 0.
    """
    secret, seconds = _secret(), float(settings.engine_options.get("start_timeout") or 300.0)
    job, home = f"call-{next(_calls)}", [(world.address, world.port)]
    where = [job, str(world.node), str(world.nodes), f"{world.address}:{world.port}", f"{seconds:g}"]
    agent = _start([sys.executable, *processes.program("airdist.arrival"), *where], secret, None)
    try:
        value, raised = _outcome(home, secret, seconds, {"job": job, "guest": world.node})
    except BaseException:
        _end(agent, 0)
        raise
    _end(agent, _END_SECONDS)
    if raised is not None:
        raise raised
    return value


def _outcome(
    home: list[tuple[str, int]], secret: str, seconds: float, hello: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    """What the launch returned, or raised."""
    try:
        channel = dial(home, secret, seconds=seconds)
    except LinkError as error:
        raise LaunchError(f"node 0 of this allocation cannot be reached: {error}") from error
    channel.send("hello", **hello)
    messages: list[dict[str, Any]] = []
    while not messages and not channel.closed:
        messages = channel.receive()
    channel.close()
    if not messages:
        raise AgentDiedError("the process on node 0 is gone, and the ranks with it")
    value, raised = pickle.loads(messages[0]["data"])  # noqa: S301 - from a process that knows the secret
    return value, raised


def _start(argv: list[str], secret: str, log: Path | None) -> subprocess.Popen[bytes]:
    with nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env={**os.environ, SECRET: secret},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_SECONDS)
    finally:  # also when an interrupt cuts the waiting short
        if process.poll() is None:
            process.kill()
            process.wait()
