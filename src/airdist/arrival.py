"""An agent's first steps on another machine: find its owner, get its orders, and see what this machine has.

    python -c … airdist.arrival:main <import root> <job> <node> <nodes> <host:port,…> <seconds>

The secret of the launch is in `AIRDIST_SECRET`. Every agent calls the caller and says which node it is; that of node 0
stays on the line, as the leader, and listens itself; the others are told where that is, and call there. What a node has
(accelerators, versions) is looked at before the leader lets anything start.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airdist import processes
from airdist.devices import allocate
from airdist.environ import LOOPBACK, SECRET, launch_environ
from airdist.errors import DeviceError, LaunchError
from airdist.follower import Follower
from airdist.leader import Leader
from airdist.link import Door, LinkError, dial, interface_of, own_addresses
from airdist.mirror import Mirror
from airdist.rundir import RunDirectory
from airdist.spec import AgentSpec, spec_of
from airdist.versions import differences, versions_here

if TYPE_CHECKING:
    from airdist.channel import Channel

__all__ = ["main"]

_AGAIN_SECONDS = 0.2


@dataclass(frozen=True)
class _Ready:
    """What a node has found out about itself.

    Attributes:
        spec: the spec, with what this node decides.
        environ: environment of its ranks.
        about: what the caller is to know of it.
    """

    spec: AgentSpec
    environ: dict[str, str]
    about: dict[str, Any]


def main() -> None:
    """Entry point of an agent on a machine that an engine has reached."""
    _, _, job, node_or_variable, nodes, addresses, seconds = sys.argv
    secret = os.environ.pop(SECRET, "")
    node = int(os.environ.get(node_or_variable, node_or_variable))
    home = [(host, int(port)) for host, _, port in (entry.rpartition(":") for entry in addresses.split(","))]
    processes.adopt_orphans()
    hello = {"job": job, "node": node, "host": socket.gethostname()}
    try:
        if node == 0:
            _lead(job, dial(home, secret, seconds=float(seconds)), Door(secret) if int(nodes) > 1 else None, hello)
        else:
            _follow(job, node, _find_leader(home, secret, float(seconds), hello), hello)
    except LinkError as error:
        sys.exit(f"airdist: node {node} of {nodes} cannot reach its launch {job}: {error}")


def _lead(job: str, owner: Channel, door: Door | None, hello: dict[str, Any]) -> None:
    port = None if door is None else door.port
    owner.send("hello", **hello, addresses=[] if port is None else [(host, port) for host in own_addresses()])
    directory = RunDirectory.of_node(job, 0)
    spec, others = _receive_spec(owner, directory)
    ready = _prepare(spec, directory, LOOPBACK if door is None else None)
    if isinstance(ready, LaunchError | DeviceError):
        refusal = {"node": 0, "host": hello["host"], "error": type(ready).__name__, "text": str(ready)}
        owner.send("ended", reason="refused", attempt=spec.attempt, leftovers=[], ranks=[], refused=[refusal])
        directory.remove()
        return
    os.set_blocking(owner.fileno(), False)
    mirror = Mirror(directory.path, owner)
    # The spec goes on to the others as it came, and the payload out of this node's directory.
    leader = Leader(ready.spec, owner, directory, ready.environ, mirror=mirror, door=door, about=ready.about)
    for message in others:
        leader.take(message)
    try:
        leader.run()
    finally:
        directory.remove_data()  # it may be large; logs that nobody has taken stay
    if not owner.closed:
        directory.remove()


def _find_leader(home: list[tuple[str, int]], secret: str, seconds: float, hello: dict[str, Any]) -> Channel:
    deadline = time.monotonic() + seconds
    messages: list[dict[str, Any]] = []
    while not messages:
        caller = dial(home, secret, seconds=max(0.0, deadline - time.monotonic()))
        caller.send("hello", **hello)
        while not messages and not caller.closed:
            messages = caller.receive()
        caller.close()  # without an answer it was the launch before this one, on the same port, and is about to end
        if not messages:
            time.sleep(_AGAIN_SECONDS)
    addresses = [(host, port) for host, port in messages[0]["addresses"]]
    return dial(addresses, secret, seconds=seconds)


def _follow(job: str, node: int, leader: Channel, hello: dict[str, Any]) -> None:
    leader.send("hello", **hello)
    directory = RunDirectory.of_node(job, node)
    spec, others = _receive_spec(leader, directory)
    ready = _prepare(spec, directory, interface_of(leader.addresses[0]))
    if isinstance(ready, LaunchError | DeviceError):
        leader.send("refused", error=type(ready).__name__, text=str(ready))
        directory.remove()
        while not leader.closed:  # until it has been read
            leader.receive()
        return
    leader.send("node", node=node, **ready.about)
    os.set_blocking(leader.fileno(), False)
    follower = Follower(ready.spec, leader, directory, ready.environ, mirror=Mirror(directory.path, leader), node=node)
    for message in others:
        follower.take(message)
    try:
        delivered = follower.run()
    finally:
        directory.remove_data()
    if delivered:
        directory.remove()


def _receive_spec(owner: Channel, directory: RunDirectory) -> tuple[AgentSpec, list[dict[str, Any]]]:
    """The spec, once the payload is here too, and what the owner has said after it."""
    spec: AgentSpec | None = None
    size, others = -1, []
    while spec is None or not (directory.payload.exists() and directory.payload.stat().st_size >= size):
        for message in owner.receive():
            if message["kind"] == "spec":
                size = message.pop("payload")
                spec = spec_of(message)
            elif message["kind"] == "file":
                directory.put(message["name"], message["offset"], message["data"])
            else:
                others.append(message)
        if owner.closed:
            directory.remove()
            raise LinkError("its owner is gone")
    return spec, others


def _prepare(spec: AgentSpec, directory: RunDirectory, interface: str | None) -> _Ready | LaunchError | DeviceError:
    assert spec.remote is not None
    wanted = spec.remote
    environ = {**os.environ, **wanted["environ"], **wanted["overrides"]}
    unlike = differences(wanted["versions"], versions_here(wanted["versions"]))
    theirs, ours = (version.split(".")[:2] for version in unlike.get("python", ("", "")))
    if theirs != ours:
        return LaunchError(
            f"Python is {unlike['python'][1]} here and {unlike['python'][0]} where the launch was made; functions "
            "travel as bytecode, so that both must be of the same release"
        )
    try:
        allocation = allocate(**wanted["accelerators"], environ=environ)
    except DeviceError as error:
        return error
    environ = launch_environ(
        environ,
        overrides=wanted["overrides"],
        nprocs=allocation.nprocs,
        visible=None if allocation.per_rank_visible else allocation.visible,
        interface=interface,
        step=True,
    )
    masks, cwd = allocation.per_rank_visible, wanted["cwd"] if os.path.isdir(wanted["cwd"]) else str(directory.path)
    about = {
        "host": socket.gethostname(),
        "nprocs": allocation.nprocs,
        "accelerator_type": allocation.accelerator_type,
        "versions": unlike,
        "run_dir": str(directory.path),
        "cwd": cwd,
        "path": [entry for entry in wanted["path"] if not os.path.exists(entry)],
    }
    own = spec._replace(
        run_dir=str(directory.path), nprocs=allocation.nprocs, cwd=cwd, visible=list(masks or ()) or None
    )
    return _Ready(own, environ, about)
