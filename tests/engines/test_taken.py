"""Nodes that a scheduler takes away: it asks all their processes to end, in no order."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airdist import LaunchCancelledError


@pytest.fixture
def launchable(host_place):
    return host_place.launchable


# A rank asks itself to end, and once it is gone something asks an agent: as a scheduler does it that takes nodes away.
_TAKE = """
import os, signal, sys, time
rank, agent = map(int, sys.argv[1:])
while os.path.exists(f"/proc/{rank}") and open(f"/proc/{rank}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
time.sleep(0.5)  # longer than the leader waits for the peers of a rank that failed by itself
os.kill(agent, signal.SIGTERM)
"""


def take_away(node):
    if os.environ["NODE_RANK"] == str(node) and os.environ["LOCAL_RANK"] == "0":
        subprocess.Popen([sys.executable, "-c", _TAKE, str(os.getpid()), str(os.getppid())])
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


@pytest.mark.parametrize("node", [0, 1])
def test_ranks_that_hear_before_their_agent_that_a_node_is_taken_away_have_not_failed(launchable, node):
    with pytest.raises(LaunchCancelledError, match=f"ended by SIGTERM to the agent of node {node}"):
        launchable(take_away).distributed(node)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_taken_away_costs_one_restart_whoever_hears_of_it_first(launchable, tmp_path, node):
    def work(folder):
        agent = Path(folder) / os.environ["RANK"]
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            agent.write_text(str(os.getppid()))
            take_away(node)
        while os.path.exists(f"/proc/{agent.read_text()}"):  # one that starts its ranks once more ends here
            time.sleep(0.01)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    launch = launchable(work, max_restarts=1, engine_options={"restarts": 1})
    assert launch.distributed(tmp_path) == ["1"] * 4
