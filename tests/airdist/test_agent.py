"""The agent, spoken to as its owner does: what it starts, says and ends."""

import os
import signal
import socket
import sys
import time

import psutil
import pytest

from airdist.channel import Channel
from airdist.engines.base import Order
from airdist.engines.local import LocalEngine
from airdist.environ import launch_environ
from airdist.payload import pack
from airdist.rundir import RunDirectory
from airdist.spec import AgentSpec


@pytest.fixture
def start(cpu_world):
    agents = []

    def start(function, *args, nprocs=2, environ=None, **spec):
        directory = RunDirectory.create(cpu_world, "function")
        directory.payload.write_bytes(pack(function, args, {}))
        given = environ or launch_environ(os.environ, overrides={}, nprocs=nprocs, visible=None, interface="lo")
        asked = AgentSpec(run_dir=str(directory.path), nprocs=nprocs, cwd=str(cpu_world), **spec)
        agent = LocalEngine().start(Order("job", asked, directory.path, given))
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.close(0)


def messages(agent, until):
    """Everything the agent says up to a message of kind `until`."""
    found = []
    while not found or found[-1]["kind"] != until:
        assert not agent.channel.closed, found
        found.extend(agent.channel.receive())
    return found


def output(said, rank):
    return b"".join(
        message["data"] for message in said if message["kind"] == "log" and message["rank"] == rank
    ).decode()


def test_it_says_what_it_started_and_how_it_ended(start):
    agent = start(abs, -1)
    started, ended = messages(agent, "ended")
    assert (started["kind"], started["attempt"], len(set(started["pids"]))) == ("started", 0, 2)
    assert (ended["reason"], ended["attempt"], ended["leftovers"]) == ("finished", 0, [])
    assert [(rank["rank"], rank["outcome"], rank["returncode"]) for rank in ended["ranks"]] == [
        (0, "value", 0),
        (1, "value", 0),
    ]
    assert agent.process.wait(10) == 0


def test_ranks_lead_sessions_of_their_own_and_know_their_agent(start):
    agent = start(time.sleep, 600)
    (started,) = messages(agent, "started")
    assert agent.alive()
    for pid in started["pids"]:
        assert os.getsid(pid) == pid
        assert psutil.Process(pid).ppid() == agent.process.pid
    assert os.getsid(agent.process.pid) == agent.process.pid


def test_a_stop_ends_the_ranks_and_is_no_failure_of_theirs(start):
    agent = start(time.sleep, 600, grace=5)
    messages(agent, "started")
    agent.channel.send("stop")
    ended = messages(agent, "ended")[-1]
    assert ended["reason"] == "cancelled"
    assert [rank["stopped"] for rank in ended["ranks"]] == [True, True]


def test_a_kill_does_not_wait_for_the_grace(start):
    def deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(600)

    agent = start(deaf, nprocs=1, grace=300)
    messages(agent, "log")
    agent.channel.send("stop")
    agent.channel.send("kill")
    ended = messages(agent, "ended")[-1]
    assert ended["ranks"][0]["returncode"] == -signal.SIGKILL


def test_sigterm_to_the_agent_ends_its_ranks_in_order(start):
    agent = start(time.sleep, 600)
    messages(agent, "started")
    agent.process.terminate()
    assert messages(agent, "ended")[-1]["reason"] == "cancelled"


def test_a_failure_is_reported_with_the_rank_and_restarts_are_counted(start):
    def fails():
        raise ValueError(os.environ["TORCHELASTIC_RESTART_COUNT"])

    said = messages(start(fails, nprocs=1, max_restarts=2), "ended")
    restarts = [message for message in said if message["kind"] == "restarting"]
    assert [(message["rank"], message["attempt"], message["summary"]) for message in restarts] == [
        (0, 1, "ValueError: 0"),
        (0, 2, "ValueError: 1"),
    ]
    assert (said[-1]["reason"], said[-1]["attempt"]) == ("failed", 2)


def test_output_is_forwarded_only_to_an_owner_that_wants_it(start, cpu_world):
    def talks():
        print("hello")

    said = messages(start(talks, nprocs=1), "ended")
    assert output(said, 0) == "hello\n"
    quiet = messages(start(talks, nprocs=1, forward_logs=False), "ended")
    assert [m["kind"] for m in quiet] == ["started", "ended"]
    assert [path.read_text() for path in cpu_world.glob("*/logs/rank-0.log")] == ["hello\n", "hello\n"]


def test_each_rank_sees_the_devices_it_was_given(start):
    def tells():
        print(os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"])

    said = messages(start(tells, visible=["GPU-a", "MIG-b"]), "ended")
    assert (output(said, 0), output(said, 1)) == ("0 GPU-a\n", "1 MIG-b\n")


def test_modules_of_the_working_directory_do_not_stand_in_for_the_standard_library(start, cpu_world):
    (cpu_world / "selectors.py").parent.mkdir(parents=True, exist_ok=True)
    (cpu_world / "selectors.py").write_text("raise ImportError('the wrong one')")
    (cpu_world / "cloudpickle.py").write_text("raise ImportError('the wrong one')")
    assert messages(start(abs, -1, nprocs=1), "ended")[-1]["reason"] == "finished"


def test_channel_messages_arrive_whole_and_in_order_whatever_their_size():
    one, other = socket.socketpair()
    one.setblocking(False)
    sender, receiver = Channel(one), Channel(other)
    sent = [{"kind": "x", "number": index, "text": "é" * size} for index, size in enumerate([0, 1, 100_000, 1_000_000])]
    for message in sent:
        sender.send(**message)
    assert sender.pending
    received = []
    while len(received) < len(sent):
        received += receiver.receive()
        sender.flush()
    assert received == sent
    assert not sender.pending


def test_a_channel_whose_other_end_is_gone_is_closed_and_quiet():
    one, other = socket.socketpair()
    sender, receiver = Channel(one), Channel(other)
    sender.send("last")
    sender.close()
    assert receiver.receive() == [{"kind": "last"}]
    assert receiver.receive() == []
    assert receiver.closed
    receiver.send("nobody hears this")
    assert not receiver.pending


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_processes_are_found_by_session_and_by_descent():
    from airdist import processes

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.setpgid(0, 0)
            os.write(write, b"x")
            time.sleep(600)
        time.sleep(600)
    os.read(read, 1)
    family = processes.session_members({child})
    assert len(family) == 2
    assert set(family) <= set(processes.descendants(os.getpid()))
    processes.kill(family)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 30
    while processes.session_members({child}):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.close(read)
    os.close(write)
