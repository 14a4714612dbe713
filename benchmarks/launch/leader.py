"""What does a launch of many nodes cost the processes that all of it comes together in, caller and node 0's agent?

Caller, agent of node 0 and its rank are real; the agents of all other nodes, with 8 ranks each, are played by one
process that speaks their protocol over as many real connections and has nothing else to do: each "rank" writes a line,
returns 100 bytes, and ends. The processor time of node 0's agent is the number to look at. The time from call to return
holds also that of the one process that plays everybody, which real nodes share among themselves.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from airdist import distributed, outcome
from airdist.channel import Channel
from airdist.engines.remote import AgentCommand, RemoteEngine
from airdist.environ import SECRET
from airdist.link import dial
from airdist.world import RankState

RANKS = 8
CALLERS = 32
BEAT_SECONDS = 5.0
NODES = (2, 128, 512, 1250)
SPENT: list[float] = []
"""Processor seconds of node 0's agent, by launch."""


class CrowdEngine(RemoteEngine):
    """Starts one agent, and a process that plays all others."""

    name: ClassVar[str] = "crowd"

    def spawn(self, command: AgentCommand) -> Crowd:
        return Crowd(command)


class Crowd:
    """The two processes."""

    job_id = None

    def __init__(self, command: AgentCommand) -> None:
        environ = {**os.environ, **command.environ()}
        # Without what it has started itself: the interpreter of its rank is waited for, and so counted, at every size.
        self.agent = subprocess.Popen(command.argv(0), env=environ, start_new_session=True)
        args = [command.job, str(command.nodes), ",".join(command.addresses)]
        self.crowd = subprocess.Popen([sys.executable, __file__, *args], env=environ)

    def state(self) -> str:
        return "running" if self.agent.poll() is None else "ended"

    def words(self) -> str:
        return ""

    def again(self) -> bool:
        return False

    def close(self, _: float) -> None:
        if self.agent.returncode is None:
            _, self.agent.returncode, used = os.wait4(self.agent.pid, 0)
            SPENT.append(used.ru_utime + used.ru_stime)
            self.crowd.kill()  # all that it had to say has been heard
            self.crowd.wait()


class Player:
    """One of the other nodes."""

    def __init__(self, node: int, channel: Channel, value: bytes) -> None:
        self.node = node
        self.channel = channel
        self.value = value
        self.ranks: list[RankState] = []

    def serve(self) -> bool:
        """Answer what has come; whether there is more to come."""
        self.channel.flush()
        for message in self.channel.receive():
            answer = getattr(self, f"on_{message['kind']}", None)
            if answer is not None:
                answer(message)
        return not self.channel.closed

    def on_spec(self, spec: dict[str, Any]) -> None:
        about = {"accelerator_type": None, "versions": {}, "run_dir": "/", "cwd": spec["cwd"], "path": []}
        self.channel.send("node", node=self.node, host=f"host-{self.node}", nprocs=RANKS, **about)

    def on_start(self, message: dict[str, Any]) -> None:
        first = message["first"]
        self.channel.send("started", attempt=0, pids=list(range(RANKS)))
        self.ranks = [RankState(number, self.node, f"host-{self.node}") for number in range(first, first + RANKS)]
        for rank in self.ranks:
            self.channel.send("file", name=f"logs/rank-{rank.rank}.log", offset=0, data=b"a line of output\n")
            self.channel.send("file", name=f"results/rank-{rank.rank}.0.pkl", offset=0, data=self.value)
            rank.outcome = "value"
            self.channel.send("rank", report=rank.report(), age=0.0)

    def on_release(self, _: dict[str, Any]) -> None:
        for rank in self.ranks:
            rank.returncode = 0
            self.channel.send("rank", report=rank.report(), age=0.0)

    def on_clear(self, _: dict[str, Any]) -> None:
        self.channel.send("cleared", leftovers=[])

    def on_bye(self, _: dict[str, Any]) -> None:
        self.channel.close()


def call(job: str, node: int, home: list[tuple[str, int]], secret: str) -> Channel:
    """As every agent does: ask the caller first, which tells where node 0 is."""
    answers: list[dict[str, Any]] = []
    while not answers:
        with_caller = dial(home, secret, seconds=120)
        with_caller.send("hello", job=job, node=node, host=f"host-{node}")
        while not answers and not with_caller.closed:
            answers = with_caller.receive()
        with_caller.close()
    channel = dial([(host, port) for host, port in answers[0]["addresses"]], secret, seconds=120)
    channel.send("hello", job=job, node=node, host=f"host-{node}")
    os.set_blocking(channel.fileno(), False)
    return channel


def serve(selector: selectors.BaseSelector, players: set[Player]) -> None:
    """Let the players answer what has come."""
    for key, _ in selector.select(0.05):
        if not key.data.serve():
            players.discard(key.data)
            selector.unregister(key.fd)


def play(job: str, nodes: int, home: list[tuple[str, int]]) -> None:
    """Be all nodes but the first."""
    secret = os.environ[SECRET]
    with tempfile.TemporaryDirectory() as folder:
        outcome.write(outcome.Returned(b"x" * 100), Path(folder, "value"), rank=0)
        value = Path(folder, "value").read_bytes()
    players: set[Player] = set()
    beaten = time.monotonic()
    with selectors.DefaultSelector() as selector, ThreadPoolExecutor(CALLERS) as callers:
        coming = {callers.submit(call, job, node, home, secret): node for node in range(1, nodes)}
        while coming or players:
            for future in [future for future in coming if future.done()]:
                player = Player(coming.pop(future), future.result(), value)
                players.add(player)
                selector.register(player.channel.fileno(), selectors.EVENT_READ, player)
            serve(selector, players)
            if time.monotonic() - beaten > BEAT_SECONDS:
                beaten = time.monotonic()
                for player in players:
                    player.channel.send("beat")


def rank() -> bytes:
    return b"x" * 100


def launch(nodes: int) -> float:
    """Seconds from call to return."""
    start = time.monotonic()
    options = {"start_timeout": 300}
    settings = {"engine": "leader:CrowdEngine", "nodes": nodes, "num_accelerators": 1, "engine_options": options}
    results = distributed(**settings, tracking=False, logs="none", timeout=600)(rank).distributed()
    assert len(results) == 1 + RANKS * (nodes - 1)
    return time.monotonic() - start


def measure(rounds: int = 3):
    """Launches of up to 512 nodes."""
    from report import Table

    sys.path.append(str(Path(__file__).parent))
    import leader

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AIRDIST_RUN_DIR"] = folder
        for _ in range(rounds):
            for nodes in NODES:
                ranks = 1 + RANKS * (nodes - 1)
                times.setdefault(f"{nodes} nodes, {ranks} ranks: call to return", []).append(leader.launch(nodes))
                times.setdefault(f"{nodes} nodes, {ranks} ranks: CPU of node 0's agent", []).append(leader.SPENT[-1])
    return Table("one launch of many nodes, of which all but the first are played", times)


if __name__ == "__main__":
    callers = [address.rpartition(":") for address in sys.argv[3].split(",")]
    play(sys.argv[1], int(sys.argv[2]), [(host, int(port)) for host, _, port in callers])
