"""A saving process is killed, or two of them meet, and what is published is whole all the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from airdata.checkpoint import CheckpointManager, UCVolumeReader, UCVolumeWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:checkpoints under"),
]

# Every tensor of a checkpoint holds the number of its save, so that a mix of two saves shows.
TENSORS = 6
# Imports once, then forks a saver for each line it is given: 25 kills then take seconds and not a minute.
SAVERS = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from airdata.checkpoint import CheckpointManager
torch.set_num_threads(1)
root = sys.argv[1]

def save_for_ever(first, value, again):
    manager = CheckpointManager(root, keep_last=2, async_save=False, writer_options={"file_bytes": 300_000})
    step = first
    while True:
        manager.save(step, {**{f"t{n}": torch.full((40_000,), float(value)) for n in range(6)}, "value": value})
        os.write(1, f"saved {step} {value}\\n".encode())
        value += 1
        step += not again

for line in sys.stdin:
    first, value, mode = line.split()
    child = os.fork()
    if child == 0:
        os.write(1, f"pid {os.getpid()}\\n".encode())
        try:
            save_for_ever(int(first), int(value), mode == "again")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\\n".encode())
"""


def check_whole(root):
    """Every published checkpoint loads to bits of one save; returns value by step."""
    manager = CheckpointManager(root, keep_last=None)
    values = {}
    for step in manager.steps():
        manager.verify(step)
        state = {**{f"t{n}": torch.zeros(40_000) for n in range(TENSORS)}, "value": 0}
        assert manager.restore(state, step) == step
        assert all(bool((state[f"t{n}"] == state["value"]).all()) for n in range(TENSORS))
        values[step] = state["value"]
    return values


def kill_at_random_moments(root, kills, mode, seed):
    dice = random.Random(seed)
    savers = subprocess.Popen(
        [sys.executable, "-c", SAVERS, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    first, value, values = 1, 1, {}
    try:
        for _ in range(kills):
            savers.stdin.write(f"{first} {value} {mode}\n")
            savers.stdin.flush()
            pid = int(savers.stdout.readline().removeprefix("pid "))
            reported = [savers.stdout.readline() for _ in range(dice.randrange(3))]
            # A save takes about 10 ms, so this strikes inside the next one or two.
            timer = threading.Timer(dice.random() * 0.03, os.kill, (pid, signal.SIGKILL))
            timer.start()
            while not (line := savers.stdout.readline()).startswith("ended"):
                reported.append(line)
            assert line == "ended -9\n"
            values = check_whole(root)
            for report in reported[-1:]:
                _, step, known = report.split()
                # What was reported as saved is there, or was replaced by something newer that is whole.
                assert max(values) >= int(step)
                assert max(values.values()) >= int(known)
            first = max(values, default=0) + 1 if mode == "new" else 1
            value = max([value, *values.values()]) + 1
    finally:
        savers.kill()
        savers.wait()
    assert values, "no save came through at all: the test proves nothing"


@pytest.mark.parametrize("mode", ["new", "again"])
def test_sigkill_during_a_save_never_harms_what_is_published(mode, tmp_path):
    kill_at_random_moments(tmp_path, 25, mode, seed=os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["new", "again"])
def test_two_hundred_kills(mode, tmp_path):
    kill_at_random_moments(tmp_path, 100, mode, seed=7)


def test_what_the_store_refused_shows_in_the_summary_of_the_save(s3_proxy, s3_volume):
    options = {**s3_volume.storage_options, "endpoint_url": s3_proxy.url}
    s3_proxy.set_faults({"method": "PUT", "status": 503, "times": 3})
    writer = UCVolumeWriter(s3_volume.url, storage_options=options)
    summary = dcp.save({"x": torch.ones(1000)}, storage_writer=writer, no_dist=True).save_summary
    assert summary.retries == 3
    assert str(summary).endswith("3 retries")


def test_two_savers_on_one_path_leave_one_whole_checkpoint(tmp_path):
    errors = []

    def saver(value):
        try:
            for _ in range(15):
                state = {f"t{n}": torch.full((5000,), value) for n in range(TENSORS)}
                dcp.save(state, storage_writer=UCVolumeWriter(tmp_path, file_bytes=30_000), no_dist=True)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=saver, args=(float(value),)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    state = {f"t{n}": torch.zeros(5000) for n in range(TENSORS)}
    dcp.load(state, storage_reader=UCVolumeReader(tmp_path, verify="files"), no_dist=True)
    assert len({float(value) for tensor in state.values() for value in tensor.unique()}) == 1


def test_loading_while_the_same_path_is_saved_gives_one_save_or_a_clear_error(tmp_path):
    done = threading.Event()

    def saver():
        value = 0.0
        while not done.is_set():
            value += 1
            state = {f"t{n}": torch.full((5000,), value) for n in range(TENSORS)}
            dcp.save(state, storage_writer=UCVolumeWriter(tmp_path, file_bytes=30_000), no_dist=True)

    dcp.save(
        {f"t{n}": torch.zeros(5000) for n in range(TENSORS)}, storage_writer=UCVolumeWriter(tmp_path), no_dist=True
    )
    thread = threading.Thread(target=saver)
    thread.start()
    loaded, refused = 0, []
    try:
        for _ in range(40):
            state = {f"t{n}": torch.full((5000,), -1.0) for n in range(TENSORS)}
            try:
                dcp.load(state, storage_reader=UCVolumeReader(tmp_path), no_dist=True)
            except CheckpointException as error:
                refused.append(str(error))
                continue
            loaded += 1
            assert len({float(value) for tensor in state.values() for value in tensor.unique()}) == 1
    finally:
        done.set()
        thread.join(timeout=60)
    assert loaded
    assert all("was replaced" in message for message in refused), refused


@pytest.mark.timeout(170)
def test_a_killed_rank_fails_the_save_of_the_others_and_publishes_nothing(tmp_path):
    program = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from airdata.checkpoint import CheckpointManager, UCVolumeReader, UCVolumeWriter
from airdata.errors import CheckpointError
root, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
manager = CheckpointManager(f"{root}/steps", async_save=False, timeout=60)
manager.save(1, {f"own{rank}": torch.ones(10)})
if rank == 1:
    DefaultSavePlanner.resolve_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
try:
    manager.save(2, {f"own{rank}": torch.ones(10)})
except CheckpointError as error:
    print(type(error).__name__, manager.steps(), flush=True)
os._exit(0)
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert outputs[0] == "CheckpointError [1]\n"
    assert not list((tmp_path / "steps/step-00000002").glob("__0_*"))
