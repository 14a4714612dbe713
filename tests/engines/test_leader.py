"""Nodes that are lost at awkward moments: while they gather, after a long queue, or with orphans alone left to end.

The nodes are processes on this machine, each with directories of its own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import host_engine
import psutil
import pytest

from airdist import AgentDiedError, NodeLostError


class QueueEngine(host_engine.HostEngine):
    """Has its nodes wait until the file `gate` exists, as a scheduler would."""

    keys = host_engine.HostEngine.keys | {"gate"}

    def spawn(self, command):
        host_engine.STARTED.append(nodes := QueueNodes(command))
        return nodes


class QueueNodes(host_engine.HostNodes):
    def state(self):
        if not self.agents:
            if not os.path.exists(self.command.options["gate"]):
                return "queued"
            self.start()
        return super().state()


@pytest.fixture(autouse=True)
def directories(monkeypatch, tmp_path):
    """Where the nodes have their run directories."""
    (tmp_path / "nodes").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nodes"))
    return tmp_path / "nodes"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_node_1_while_nodes_gather(directories):
    # It makes its directory after it has said which node it is.
    wait_until(lambda: list(directories.glob("*-node1-*")))
    host_engine.STARTED[-1].agents[1].kill()


def attempt():
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_a_node_that_is_lost_while_the_nodes_gather_is_named_at_once(host_place, directories):
    options = {"missing": [2], "start_timeout": 600}
    launch = host_place.launchable(attempt, nodes=3, engine_options=options).submit()
    kill_node_1_while_nodes_gather(directories)
    with pytest.raises(NodeLostError, match=r"node 1 \(.*hung up") as caught:
        launch.result(60)
    assert caught.value.node == 1


def test_a_node_that_is_lost_while_the_nodes_gather_is_replaced_where_restarts_allow(host_place, directories):
    options = {"missing": [2], "start_timeout": 600, "restarts": 1}
    launch = host_place.launchable(attempt, nodes=3, engine_options=options, max_restarts=1).submit()
    wait_until(lambda: list(directories.glob("*-node1-*")))
    host_engine.STARTED[-1].command.options["missing"] = []
    kill_node_1_while_nodes_gather(directories)
    assert launch.result(60) == ["1"] * 6


@pytest.mark.parametrize("moment", ["queue", "run"])
def test_time_in_a_queue_leaves_the_time_for_restarts_as_it_is(host_place, pids, monkeypatch, moment):
    def work():
        pids.write(f"rank-{attempt()}")
        if attempt() == "0":
            while not os.path.exists(f"{pids.path}-go"):
                time.sleep(0.02)
            if os.environ["RANK"] == "3":
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        return attempt()

    passed = {"queue": 0.0, "run": 0.0}
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed.values()), sleep=time.sleep)
    monkeypatch.setattr("airdist.listener.time", clock)
    options = {"gate": f"{pids.path}-gate", "restarts": 1}
    launch = host_place.launchable(
        work, engine="test_leader:QueueEngine", engine_options=options, timeout=120, max_restarts=1
    ).submit()
    passed["queue"] += 3600 * (moment == "queue")
    Path(f"{pids.path}-gate").touch()
    pids.wait_for("rank-0", 4)
    passed["run"] += 3600 * (moment == "run")
    Path(f"{pids.path}-go").touch()
    if moment == "queue":
        assert launch.result(60) == ["1"] * 4
    else:
        assert isinstance(launch.exception(60), NodeLostError)


def test_a_follower_whose_ranks_have_ended_leaves_nothing_of_them_behind_when_its_leader_dies(host_place, pids):
    def work():
        pids.write("leader" if os.environ["NODE_RANK"] == "0" else "follower", os.getppid())
        if os.environ["NODE_RANK"] == "1":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            pids.write("orphan", child.pid)
            pids.write("rank")
            while not os.path.exists(f"{pids.path}-go"):
                time.sleep(0.02)
            os._exit(1)
        time.sleep(600)

    launch = host_place.launchable(work).submit()
    leader, _ = pids.wait_for("leader", 2)
    ranks, orphans = pids.wait_for("rank", 2), pids.read("orphan")
    os.kill(leader, signal.SIGSTOP)  # it is not to hear of the failure, and have the other node cleared
    Path(f"{pids.path}-go").touch()
    wait_until(lambda: not any(psutil.pid_exists(rank) for rank in ranks))
    assert all(psutil.pid_exists(orphan) for orphan in orphans)
    os.kill(leader, signal.SIGKILL)
    assert isinstance(launch.exception(60), AgentDiedError)
    pids.wait_for_end()
