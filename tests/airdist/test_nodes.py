"""What goes to other nodes, what they say of themselves, and how files come back from them."""

import os
import socket
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdist.channel import Channel
from airdist.environ import carried, launch_environ, network_defaults
from airdist.mirror import Mirror
from airdist.nodes import Nodes
from airdist.rundir import RunDirectory
from airdist.versions import differences, versions_here

SECRETS = """HF_TOKEN DATABRICKS_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN OPENAI_API_KEY PGPASSWORD
WANDB_API_KEY MLFLOW_TRACKING_PASSWORD AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS_TOKEN GITHUB_PAT SENTRY_DSN
GOOGLE_APPLICATION_CREDENTIALS AZURE_CLIENT_SECRET AZURE_STORAGE_ACCOUNT_KEY db_passwd KEY_PASSPHRASE""".split()
HOSTS = """HOME PATH USER HOSTNAME PWD SSH_CLIENT SLURM_JOB_ID SLURM_PROCID SLURMD_NODENAME CUDA_VISIBLE_DEVICES DISPLAY
XDG_RUNTIME_DIR KUBERNETES_SERVICE_HOST RAY_ADDRESS CONDA_PREFIX VIRTUAL_ENV LD_LIBRARY_PATH TMPDIR TERM""".split()
PLAIN = """OMP_NUM_THREADS TOKENIZERS_PARALLELISM NCCL_DEBUG HF_HOME PYTORCH_CUDA_ALLOC_CONF MLFLOW_EXPERIMENT_NAME
KEYBOARD MONKEY AIRDATA_CACHE_DIR PATTERN AUTHOR LANG""".split()


@pytest.mark.parametrize("name", PLAIN)
def test_an_ordinary_variable_is_carried(name):
    assert carried({name: "value"}) == ({name: "value"}, [])


@pytest.mark.parametrize("name", SECRETS)
def test_what_looks_like_a_secret_stays_and_is_named(name):
    assert carried({name: "value"}) == ({}, [name])


@pytest.mark.parametrize("name", HOSTS)
def test_what_describes_a_machine_or_a_job_stays_without_a_word(name):
    assert carried({name: "value"}) == ({}, [])


def test_the_secret_of_a_launch_is_not_carried_and_reaches_no_rank():
    assert "AIRDIST_SECRET" not in carried({"AIRDIST_SECRET": "x"})[0]
    environ = {"AIRDIST_SECRET": "x", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}
    seen = launch_environ(environ, overrides={}, nprocs=1, visible=None, step=True)
    assert "AIRDIST_SECRET" not in seen
    assert "SLURM_PROCID" not in seen
    assert seen["SLURM_JOB_ID"] == "7"
    assert launch_environ(environ, overrides={}, nprocs=1, visible=None)["SLURM_PROCID"] == "1"


def test_libraries_are_told_the_interface_to_the_others_unless_the_user_has():
    assert network_defaults("eth0") == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert network_defaults("lo") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert network_defaults(None) == {}
    seen = launch_environ({"GLOO_SOCKET_IFNAME": "ib0"}, overrides={}, nprocs=1, visible=None, interface="eth0")
    assert (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == ("ib0", "=eth0")


def said(node, **more):
    return {"node": node, "host": f"h{node}", "versions": {}, "path": [], "cwd": "/w", "run_dir": "/tmp/r"} | more


def test_nodes_that_differ_in_the_same_way_are_one_line_and_it_is_said_once():
    nodes = Nodes(["HF_TOKEN"])
    for node in range(3):
        nodes.add(
            said(node, versions={"torch": ("2.13.0", "2.11.0")} if node else {}, path=["/home/me"] if node == 2 else [])
        )
    assert nodes.report() == [
        "nodes 1 (h1), 2 (h2): other versions: torch 2.11.0 (here 2.13.0)",
        "node 2 (h2): not there, though in sys.path here: /home/me",
        "not sent to the nodes, as they look like secrets (env= sends them): HF_TOKEN",
    ]
    assert nodes.report() == []
    assert nodes.tags() == {"nodes": "3", "hosts": "h0, h1, h2"}


def test_a_launch_on_this_machine_reports_nothing():
    assert Nodes(["HF_TOKEN"]).report() == []
    assert Nodes().tags() == {}


def test_versions_are_those_of_installed_packages_and_of_python():
    here = versions_here()
    assert here["python"].count(".") == 2
    assert {"torch", "numpy", "cloudpickle", "pytest"} <= set(here)
    assert differences(here, here) == {}
    assert differences({"torch": "1", "gone": "2"}, {"torch": "3"}) == {"torch": ("1", "3"), "gone": ("2", "none")}


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=3000)), max_size=20))
def test_files_that_grow_arrive_whole_and_in_order(tmp_path_factory, writes):
    there, here = (RunDirectory.create(tmp_path_factory.mktemp("d"), "f") for _ in range(2))
    one, other = socket.socketpair()
    one.setblocking(False)
    mirror, receiver = Mirror(there.path, Channel(one)), Channel(other)
    other.setblocking(False)
    for number in range(3):
        mirror.follow(there.log(number, 0))
    for number, data in [*writes, (0, b"last")]:
        with there.log(number, 0).open("ab") as file:
            file.write(data)
        mirror.pump()
        for message in receiver.receive():
            here.put(message["name"], message["offset"], message["data"])
    assert mirror.done()
    mirror.close()
    for number in range(3):
        sent, got = there.log(number, 0), here.log(number, 0)
        assert (got.read_bytes() if got.exists() else b"") == (sent.read_bytes() if sent.exists() else b"")


def test_a_link_that_takes_nothing_costs_no_memory_and_a_closed_one_nothing_at_all(tmp_path):
    one, other = socket.socketpair()
    one.setblocking(False)
    directory = RunDirectory.create(tmp_path, "f")
    directory.log(0, 0).write_bytes(os.urandom(8 << 20))
    mirror = Mirror(directory.path, channel := Channel(one))
    mirror.follow(directory.log(0, 0))
    for _ in range(100):
        mirror.pump()
    assert 0 < channel.pending < 2 << 20
    assert not mirror.done()
    other.close()
    channel.flush()
    mirror.pump()
    assert channel.pending == 0


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "logs/../../x", "logs/rank-0.log/../../x", "results/rank-0.0.sh", ""]
)
def test_a_file_from_another_machine_lands_nowhere_but_in_its_place(tmp_path, name):
    directory = RunDirectory.create(tmp_path, "f")
    with pytest.raises(ValueError, match="no file of a run directory"):
        directory.put(name, 0, b"x")


@given(st.text(string.printable, max_size=40))
def test_a_node_s_directory_is_private_whatever_the_job_is_called(job):
    directory = RunDirectory.of_node(job, 3)
    try:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert "-node3-" in directory.path.name
    finally:
        directory.remove()
