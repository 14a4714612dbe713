"""Rank facts: the process's environment first, then its process group, then a plain single process."""

import subprocess
import sys

import pytest

from airdist import runtime

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


def facts():
    return (
        runtime.get_global_rank(),
        runtime.get_world_size(),
        runtime.get_local_rank(),
        runtime.get_local_world_size(),
        runtime.get_node_rank(),
        runtime.get_replica_rank(),
    )


def test_a_plain_process_is_rank_0_of_1():
    assert facts() == (0, 1, 0, 1, 0, 0)


def test_a_rank_reads_its_environment(environment):
    environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, NODE_RANK=1)
    assert facts() == (5, 8, 1, 4, 1, 5)


def test_torchruns_name_of_the_node_rank_is_read(environment):
    environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1)
    assert runtime.get_node_rank() == 1


def test_the_node_rank_of_the_only_node_is_0(environment):
    environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    assert runtime.get_node_rank() == 0


@pytest.mark.parametrize("present", ["RANK", "WORLD_SIZE"])
def test_one_of_rank_and_world_size_is_an_error_that_names_both(environment, present):
    environment(**{present: 1})
    absent = {"RANK": "WORLD_SIZE", "WORLD_SIZE": "RANK"}[present]
    for function in (runtime.get_global_rank, runtime.get_world_size, runtime.get_local_rank, runtime.get_node_rank):
        with pytest.raises(RuntimeError, match=f"{present}=1 is set and {absent} is not"):
            function()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"])
def test_a_fact_that_cannot_be_known_is_an_error_and_not_a_0(environment, name):
    environment(RANK=3, WORLD_SIZE=4)
    with pytest.raises(RuntimeError, match=f"rank 3 of 4, and {name}"):
        getattr(runtime, f"get_{name.lower()}")()


@pytest.mark.parametrize("value", ["-1", "two", "1.5"])
def test_a_value_that_is_no_rank_is_named(environment, value):
    environment(RANK=value, WORLD_SIZE=4)
    with pytest.raises(RuntimeError, match=f"RANK='{value}'"):
        runtime.get_global_rank()


def test_a_rank_outside_the_world_is_an_error(environment):
    environment(RANK=4, WORLD_SIZE=4)
    with pytest.raises(RuntimeError, match="RANK=4 and WORLD_SIZE=4 contradict"):
        runtime.get_world_size()


def test_an_empty_variable_is_an_unset_one(environment):
    environment(RANK="", WORLD_SIZE="")
    assert facts() == (0, 1, 0, 1, 0, 0)


def test_a_group_needs_an_initialised_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        runtime.get_global_rank(group=object())


def test_asking_does_not_import_torch():
    code = "import sys; from airdist import runtime; print(runtime.get_world_size(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1", "False"]


GROUP_PROGRAM = """
import os, sys
import torch.distributed as dist
from airdist import runtime
rank, where = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + where, rank=rank, world_size=2)
alone = dist.new_group([1])
try:
    local = runtime.get_local_rank()
except RuntimeError as error:
    local = "unknown" if "LOCAL_RANK" in str(error) else "?"
found = [runtime.get_global_rank(), runtime.get_world_size(), runtime.get_global_rank(alone), local]
os.environ.update(RANK="0", WORLD_SIZE="1")
found += [runtime.get_global_rank(), runtime.get_world_size(), runtime.get_local_rank()]
print(*found, flush=True)
dist.barrier()
os._exit(0)
"""


def test_a_process_group_is_asked_where_the_environment_is_silent(tmp_path):
    # Given two processes that made a group without any variable, as torch.multiprocessing users do
    command = [sys.executable, "-c", GROUP_PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Then rank, size and the rank in a group come from it; the place on the node is unknown; and variables win once set.
    assert said == [
        ["0", "2", "-1", "unknown", "0", "1", "0"],
        ["1", "2", "0", "unknown", "0", "1", "0"],
    ]
