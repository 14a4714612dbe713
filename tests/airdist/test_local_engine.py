"""The local engine starts one agent, and what it starts it can end."""

import os
import time

import pytest

from airdist import LaunchError
from airdist.engines import choose_engine
from airdist.engines.base import Order
from airdist.engines.local import LocalEngine
from airdist.payload import pack
from airdist.rundir import RunDirectory, run_root
from airdist.spec import AgentSpec


def start(root, function, *args, environ=None):
    directory = RunDirectory.create(root, "function")
    directory.payload.write_bytes(pack(function, args, {}))
    spec = AgentSpec(run_dir=str(directory.path), nprocs=1, cwd=str(root))
    return LocalEngine().start(Order("job", spec, directory.path, environ or dict(os.environ)))


def test_the_environment_of_the_ranks_is_the_one_given_and_not_this_process_s(cpu_world, monkeypatch):
    monkeypatch.setenv("HERE", "1")
    given = {"PATH": os.environ["PATH"], "ONLY": "this"}
    agent = start(cpu_world, lambda: print(os.environ.get("HERE"), os.environ["ONLY"]), environ=given)
    said = []
    while not said or said[-1]["kind"] != "ended":
        said += agent.channel.receive()
    assert b"".join(message["data"] for message in said if message["kind"] == "log") == b"None this\n"
    agent.close(10)


def test_closing_ends_an_agent_that_does_not_end_itself(cpu_world):
    agent = start(cpu_world, time.sleep, 600)
    assert agent.alive()
    agent.close(0)
    assert not agent.alive()
    assert agent.channel.closed


def test_the_local_engine_is_the_default_and_arguments_come_before_the_environment():
    assert choose_engine(None, remote=False, environ={}).name == "local"
    assert choose_engine("local", remote=False, environ={"AIRDIST_ENGINE": "slurm"}).name == "local"
    assert choose_engine(None, remote=False, environ={"AIRDIST_ENGINE": "slurm"}).name == "slurm"
    with pytest.raises(LaunchError, match=r"engine='pbs' does not exist; there is 'local', .*'slurm'"):
        choose_engine(None, remote=False, environ={"AIRDIST_ENGINE": "pbs"})


def test_remote_means_the_engine_that_is_configured():
    assert choose_engine(None, remote=True, environ={"AIRDIST_ENGINE": "slurm"}).name == "slurm"
    for environ in ({}, {"AIRDIST_ENGINE": "local"}):
        with pytest.raises(LaunchError, match="no engine that reaches them is configured"):
            choose_engine(None, remote=True, environ=environ)


def test_an_engine_of_one_s_own_is_named_by_its_class():
    assert choose_engine("airdist.engines.local:LocalEngine", remote=False, environ={}).name == "local"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AIRDIST_RUN_DIR": "/a/b"}, "/a/b"),
        ({"XDG_STATE_HOME": "/state"}, "/state/airdist/runs"),
        ({}, os.path.expanduser("~/.local/state/airdist/runs")),
    ],
)
def test_run_directories_lie_where_the_environment_says(environ, expected):
    assert str(run_root(environ)) == expected


def test_run_directories_have_readable_and_distinct_names(tmp_path):
    first, second = (RunDirectory.create(tmp_path, "<lambda> über/../x") for _ in range(2))
    assert first != second
    assert first.path.parent == tmp_path
    assert "-lambda-über-x-" in first.path.name
