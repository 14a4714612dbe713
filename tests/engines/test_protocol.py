"""Agents of several nodes and their caller, over TCP: who comes, who is missed, what travels, and who survives whom.

The nodes are processes on this machine, each with directories of its own.
"""

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from pathlib import Path

import host_engine
import psutil
import pytest

from airdist import (
    AgentDiedError,
    DeviceError,
    LaunchCancelledError,
    LaunchError,
    NodeLostError,
    ResultError,
    distributed,
)


@pytest.fixture
def launchable(host_place, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nodes"))
    (tmp_path / "nodes").mkdir()

    def launchable(function, engine_options=None, **settings):
        return host_place.launchable(function, engine_options=engine_options or {}, **settings)

    return launchable


def ranks():
    return int(os.environ["RANK"])


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_node_that_never_comes_is_named(launchable):
    with pytest.raises(LaunchError, match=r"did not come within the time to start: 1 \(of 3"):
        launchable(ranks, {"missing": [1], "start_timeout": 4}, nodes=3).distributed()


def test_a_first_node_that_never_comes_is_named_with_the_addresses_it_was_told(launchable):
    with pytest.raises(LaunchError, match=r"node 0 has not called within 2 s .* 127\.0\.0\.1:\d+"):
        launchable(ranks, {"missing": [0], "start_timeout": 2}).distributed()


def test_agents_that_end_before_they_call_are_an_error_with_their_last_words(launchable, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module here\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="no such module here"):
        launchable(ranks, {"python": str(python)}).distributed()


def test_what_a_node_does_not_have_is_refused_there_and_named_here(launchable):
    with pytest.raises(DeviceError, match=r"node 0 \(.*'GPU_8xH100'"):
        launchable(ranks, accelerator_type="GPU_8xH100").distributed()


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_falls_silent_is_named_within_the_heartbeat(launchable, pids, node):
    def work():
        pids.write(f"agent-{os.environ['NODE_RANK']}", os.getppid())
        pids.write("rank")
        time.sleep(600)

    launch = launchable(work, {"heartbeat": 2.0}).submit()
    pids.wait_for("rank", 4)
    (agent, *_) = pids.read(f"agent-{node}")
    os.kill(agent, signal.SIGSTOP)
    try:
        error = launch.exception(60)
        assert isinstance(error, AgentDiedError if node == 0 else NodeLostError)
        assert f"node {node} (" in str(error)
        assert "not been heard of for 2 s" in str(error)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)
    pids.wait_for_end()


def test_a_caller_that_is_suspended_for_longer_than_a_heartbeat_loses_nothing(launchable, pids):
    def work():
        pids.write("rank")
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{pids.path}-go") and time.monotonic() < deadline:
            time.sleep(0.02)
        print("x" * 300_000)
        return int(os.environ["RANK"])

    launch = launchable(work, {"heartbeat": 1.0}).submit()
    pids.wait_for("rank", 4)
    # The listening thread cannot be suspended alone, so the whole process is: a child wakes it up again.
    if (child := os.fork()) == 0:
        time.sleep(4)
        Path(f"{pids.path}-go").touch()
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)
    assert launch.result(60) == [0, 1, 2, 3]
    assert [len(launch.logs(rank)) for rank in range(4)] == [300_001] * 4


def test_a_failed_rank_restarts_the_ranks_of_all_nodes_around_a_new_store(launchable):
    def work():
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        if attempt == "0" and os.environ["RANK"] == "3":
            raise ValueError("once")
        if attempt == "0":
            time.sleep(600)
        return attempt, os.environ["MASTER_PORT"], os.getppid()

    launch = launchable(work, max_restarts=2).submit()
    results = launch.result(60)
    assert {attempt for attempt, _, _ in results} == {"1"}
    assert len({port for _, port, _ in results}) == 1
    assert len({agent for _, _, agent in results}) == 2
    assert [launch.logs(rank) for rank in range(4)] == ["attempt 1\n"] * 4
    assert (launch.run_dir / "logs" / "rank-3.log").read_text().startswith("attempt 0\n")


def test_a_lost_node_is_replaced_where_the_engine_can(launchable, pids):
    def work():
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pids.write(f"rank-{attempt}")
        if attempt == "0":
            if os.environ["RANK"] == "3":
                pids.wait_for("rank-0", 4)
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        return attempt

    assert launchable(work, {"restarts": 1}, max_restarts=1).distributed() == ["1"] * 4
    pids.wait_for_end()


def test_sigterm_to_any_agent_ends_all_nodes_in_order(launchable, pids):
    def work():
        pids.write("agent" if os.environ["LOCAL_RANK"] == "0" else "other", os.getppid())
        signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up", flush=True), os._exit(0)))
        pids.write("rank")
        time.sleep(600)

    launch = launchable(work).submit()
    pids.wait_for("rank", 4)
    os.kill(pids.read("agent")[1], signal.SIGTERM)
    with pytest.raises(LaunchCancelledError, match="SIGTERM"):
        launch.result(60)
    assert [launch.logs(rank) for rank in range(4)] == ["cleaned up\n"] * 4
    pids.wait_for_end()


def test_a_cancelled_launch_ends_on_all_nodes_also_before_they_have_come(launchable, pids):
    def work():
        pids.write("rank")
        time.sleep(600)

    launch = launchable(work).submit()
    pids.wait_for("rank", 4)
    assert launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.result(60)
    pids.wait_for_end()
    launch = launchable(work, {"missing": [0]}).submit()
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.result(60)
    assert host_engine.STARTED[-1].state() == "ended"


def test_large_arguments_values_and_logs_travel_whole(launchable):
    def work(blob):
        for line in range(20_000):
            print(f"rank {os.environ['RANK']} line {line}")
        return blob[:: int(os.environ["RANK"]) + 1]

    blob = os.urandom(9 << 20)
    launch = launchable(work).submit(blob)
    assert launch.result(120) == [blob[:: rank + 1] for rank in range(4)]
    for rank in range(4):
        assert launch.logs(rank).splitlines() == [f"rank {rank} line {line}" for line in range(20_000)]


def test_the_caller_s_variables_go_along_but_not_its_secrets_nor_what_describes_its_machine(
    launchable, monkeypatch, caplog
):
    monkeypatch.setenv("MY_SETTING", "42")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter3")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("SSH_CLIENT", "here")
    names = (
        "MY_SETTING HF_TOKEN AWS_SECRET_ACCESS_KEY TOKENIZERS_PARALLELISM SSH_CLIENT AIRDIST_SECRET HOME GIVEN_TOKEN"
    )

    def work():
        return {name: os.environ.get(name) for name in names.split()}

    # What these agents inherit from this process would hide what travels, so their own environment is another one.
    own = dict.fromkeys(names.split(), "the node's own")
    seen = launchable(work, {"environ": own}, env={"GIVEN_TOKEN": "given"}).submit().result(60)
    for values in seen:
        assert values == {
            "MY_SETTING": "42",
            "HF_TOKEN": "the node's own",
            "AWS_SECRET_ACCESS_KEY": "the node's own",
            "TOKENIZERS_PARALLELISM": "false",
            "SSH_CLIENT": "the node's own",
            "AIRDIST_SECRET": None,
            "HOME": "the node's own",
            "GIVEN_TOKEN": "given",
        }
    assert "look like secrets (env= sends them): AWS_SECRET_ACCESS_KEY, HF_TOKEN" in caplog.text
    assert "hunter" not in caplog.text


def test_the_secret_of_a_launch_is_in_no_command_line_and_no_file(launchable, tmp_path, pids):
    def work():
        pids.write("rank")
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{pids.path}-go") and time.monotonic() < deadline:
            time.sleep(0.02)

    launch = launchable(work).submit()
    pids.wait_for("rank", 4)
    secret = host_engine.STARTED[-1].command.secret
    assert len(secret) == 64
    assert secret not in repr(host_engine.STARTED[-1].command)
    family = psutil.Process().children(recursive=True)
    assert len(family) >= 6
    assert not any(secret in word for process in family for word in process.cmdline())
    for pid in pids.read("rank"):
        assert secret not in str(psutil.Process(pid).environ())
    files = [path for root in (tmp_path, launch.run_dir) for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "payload.pkl" for path in files)
    assert not any(secret.encode() in path.read_bytes() for path in files)
    Path(f"{pids.path}-go").touch()
    launch.result(60)


def test_other_versions_and_missing_directories_are_one_report(launchable, tmp_path, monkeypatch, caplog):
    other = tmp_path / "other" / "cloudpickle-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudpickle\nVersion: 0.0.1\n")
    launchable(ranks, {"environ": {"PYTHONPATH": str(other.parent)}}).submit().result(60)
    (line,) = [record.message for record in caplog.records if "other versions" in record.message]
    assert line.startswith("nodes 0 (")
    assert ", 1 (" in line
    assert "cloudpickle 0.0.1 (here " in line


def test_directories_of_a_node_are_removed_once_everything_is_with_the_caller(launchable, tmp_path):
    def work():
        print(os.environ["AIRDIST_LAUNCH_DIR"])
        return os.environ["AIRDIST_LAUNCH_DIR"]

    launch = launchable(work).submit()
    directories = set(launch.result(60))
    assert len(directories) == 2
    wait_until(lambda: not any(os.path.exists(directory) for directory in directories))
    assert launch.logs(3).strip() in directories
    assert sorted(path.name for path in (launch.run_dir / "logs").iterdir()) == [
        f"rank-{rank}.log" for rank in range(4)
    ]


def test_the_interface_to_the_other_nodes_is_what_gloo_gets_unless_the_user_has_chosen(launchable):
    def work():
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME")

    from airdist.link import interface_of, own_addresses

    interface = interface_of(own_addresses()[0])
    nccl = None if interface == "lo" else f"={interface}"
    assert launchable(work).distributed() == [(interface, nccl)] * 4
    chosen = launchable(work, env={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth"}).distributed()
    assert chosen == [("lo", "eth")] * 4


@pytest.mark.slow
def test_eight_nodes_are_one_world(launchable):
    def work():
        return os.environ["NODE_RANK"], os.environ["WORLD_SIZE"]

    results = launchable(work, nodes=8, num_accelerators=1).distributed()
    assert results == [(str(node), "8") for node in range(8)]


def test_options_that_do_not_exist_are_refused_before_anything_is_made(launchable):
    with pytest.raises(LaunchError, match=r"engine_options: hartbeat: engine='host' has .*heartbeat"):
        launchable(ranks, {"hartbeat": 1}).distributed()


@pytest.mark.slow
def test_the_plain_decorator_reaches_several_nodes_by_the_environment(host_place, monkeypatch):
    monkeypatch.setenv("AIRDIST_ENGINE", "host_engine:HostEngine")
    assert distributed(nodes=2, num_accelerators=1, tracking=False)(ranks).distributed() == [0, 1]


def join_as_guest(launch, node):
    """Take part in a launch as the process of another node does, and wait until it is known there."""
    from airdist.link import dial

    command = host_engine.STARTED[-1].command
    addresses = [(host, int(port)) for host, _, port in (entry.rpartition(":") for entry in command.addresses)]
    channel = dial(addresses, command.secret, seconds=30)
    channel.send("hello", job=command.job, guest=node)
    wait_until(lambda: node in launch._agents._guests)
    return channel


def outcome_of(guest):
    messages = []
    while not messages and not guest.closed:
        messages = guest.receive()
    return pickle.loads(messages[0]["data"])


def test_a_process_that_takes_part_and_dies_ends_the_launch_everywhere_and_leaves_no_data(
    launchable, pids, monkeypatch, tmp_path
):
    monkeypatch.setattr("airdist.launch._AGENT_EXIT_SECONDS", 60.0)

    def work():
        pids.write("rank")
        time.sleep(600)

    launch = launchable(work).submit()
    pids.wait_for("rank", 4)
    assert len(list((tmp_path / "nodes").rglob("payload.pkl"))) == 2
    other, dies = join_as_guest(launch, 8), join_as_guest(launch, 7)
    dies.close()
    error = launch.exception(50)
    assert isinstance(error, NodeLostError)
    assert error.node == 7
    assert isinstance(outcome_of(other)[1], NodeLostError)
    pids.wait_for_end()
    assert not list((tmp_path / "nodes").rglob("payload.pkl"))
    assert list((tmp_path / "nodes").rglob("rank-0.log"))


def test_a_frozen_process_that_takes_part_costs_the_others_nothing(launchable, pids, monkeypatch):
    monkeypatch.setattr("airdist.engines.remote._SHARE_SECONDS", 1.0)

    def work():
        pids.write("rank")
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{pids.path}-go") and time.monotonic() < deadline:
            time.sleep(0.02)
        return b"x" * (8 << 20)

    launch = launchable(work).submit()
    pids.wait_for("rank", 4)
    frozen, other = join_as_guest(launch, 7), join_as_guest(launch, 8)
    Path(f"{pids.path}-go").touch()
    values, raised = outcome_of(other)
    assert ([len(value) for value in values], raised) == ([8 << 20] * 4, None)
    assert len(launch.result(60)) == 4
    frozen.close()


def test_an_outcome_that_cannot_be_sent_on_is_an_error_for_those_who_take_part_alone(launchable, pids):
    class Lock:
        def __reduce__(self):
            return threading.Lock, ()

    def work():
        pids.write("rank")
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{pids.path}-go") and time.monotonic() < deadline:
            time.sleep(0.02)
        return Lock()

    launch = launchable(work).submit()
    pids.wait_for("rank", 4)
    guest = join_as_guest(launch, 7)
    Path(f"{pids.path}-go").touch()
    value, raised = outcome_of(guest)
    assert value is None
    assert isinstance(raised, ResultError)
    assert "cannot be sent to the other nodes" in str(raised)
    assert len(launch.result(60)) == 4


def test_a_first_node_that_takes_long_to_look_at_itself_is_not_taken_for_lost(launchable, tmp_path):
    # Node 0 is silent for three heartbeats between its greeting and its first word.
    (tmp_path / "path-0").mkdir()
    (tmp_path / "path-0" / "sitecustomize.py").write_text(
        "import time\n"
        "from importlib import metadata\n"
        "def slow(name, version=metadata.version):\n"
        "    if name == 'cloudpickle':\n"
        "        time.sleep(3)\n"
        "    return version(name)\n"
        "metadata.version = slow\n"
    )
    options = {"heartbeat": 1.0, "environ": {"PYTHONPATH": f"{tmp_path}/path-{{node}}"}}
    assert launchable(ranks, options).distributed() == [0, 1, 2, 3]


def test_a_stranger_who_says_nothing_is_dropped_while_nobody_else_calls(launchable, monkeypatch):
    monkeypatch.setattr("airdist.link._PROOF_SECONDS", 1.0)
    launch = launchable(ranks, {"missing": [0]}).submit()
    wait_until(lambda: launch._agents._waiting)
    host, _, port = host_engine.STARTED[-1].command.addresses[-1].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as stranger:
        while stranger.recv(1 << 10):  # the door's greeting, then its end
            pass
    assert not launch.done()
    launch.cancel()
    assert isinstance(launch.exception(60), LaunchCancelledError)
