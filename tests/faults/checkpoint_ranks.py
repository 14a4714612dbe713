"""Jobs of several ranks that save until they are killed; and, as a program, where those ranks come from.

    test ──a Job, as a line of JSON──► this program, all imported ──fork──► rank 0 … rank n
    test ◄────────── what each rank says, a line each; "ended" and their exit codes ─┘

A job joins, restores the newest step, compares every element with what that save must have held, and saves on. Every
element follows from the number of the save, so that bits of another save, or of another place, show.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from airdata.checkpoint import CheckpointManager, PerRank
from airdata.errors import CheckpointError

FAILED, SURPRISED = 3, 4
ROWS, COLUMNS = 1001, 40
_SHAPES = {"rows": (ROWS, COLUMNS), "columns": (30, ROWS), "uneven": (5, 7)}


@dataclass(frozen=True)
class Job:
    """What the ranks of one job do.

    Attributes:
        root: holds the steps.
        meet: file where the ranks meet.
        world: number of ranks.
        value: of the first save; each later one counts up.
        again: save to the step that was restored, instead of the next.
        asynchronous: save in the background.
        saves: how many; 0: until killed.
        linger: a rank whose save failed stays, as a notebook would, instead of ending.
        timeout: the manager's.
        options: the store's.
    """

    root: str
    meet: str
    world: int
    value: int
    again: bool = False
    asynchronous: bool = False
    saves: int = 0
    linger: bool = False
    timeout: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)


def manager_of(job):
    return CheckpointManager(
        job.root,
        keep_last=2,
        async_save=job.asynchronous,
        prove_first=False,
        timeout=job.timeout,
        storage_options=job.options,
        writer_options={"file_bytes": 100_000},
    )


def whole(name, value):
    """A tensor as save number ``value`` holds it; shape ``_SHAPES[name]``, int64."""
    rows, columns = _SHAPES[name]
    return torch.arange(rows * columns).reshape(rows, columns) * 1_000_003 + value


def state_of(value, rank, world, mesh):
    """The state of one rank, sharded over the mesh if there is one."""
    state = {"replicated": whole("rows", value), "value": value, "world": world, "own": PerRank([value, rank])}
    for name, dimension in {"rows": 0, "columns": 1, "uneven": 0}.items():
        full = whole(name, value)
        if mesh is None:
            state[name] = full
            continue
        parts = list(full.chunk(world, dimension))
        local = parts[rank].contiguous() if rank < len(parts) else full.narrow(dimension, 0, 0)
        state[name] = DTensor.from_local(
            local, mesh, [Shard(dimension)], run_check=False, shape=full.shape, stride=full.stride()
        )
    return state


def check(state, rank, world, mesh):
    """Every element is that of the save that the state says it is."""
    value = state["value"]
    expected = state_of(value, rank, world, mesh)
    for name in ("replicated", *_SHAPES):
        found, right = (x.to_local() if isinstance(x, DTensor) else x for x in (state[name], expected[name]))
        assert torch.equal(found, right), f"{name} of save {value} is not what was saved"
    if rank < state["world"]:
        assert state["own"].value == [value, rank], f"rank {rank} was given {state['own'].value}"
    return value


# --- in the test -----------------------------------------------------------------------------------------------------


class RankServer:
    """The program below, and what its ranks say.

    Attributes:
        said: by the ranks of this job so far: ``(rank, what, words)``.
    """

    def __init__(self):
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._pids = []
        self.said = []

    def _read(self):
        for line in self._process.stdout:
            rank, what, *words = line.split()
            self._lines.put((int(rank), what, words))

    def start(self, job):
        """Begin a job."""
        self.said = []
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        self._pids = [int(pid) for pid in self.wait_for("forked")]

    def wait_for(self, what, rank=None, within=150.0):
        """The words of the next one who says this."""
        deadline = time.monotonic() + within
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                told = "\n".join(map(str, self.said[-20:]))
                raise AssertionError(f"no rank said {what!r} within {within} s, after\n{told}") from None
            self.said.append(line)
            assert line[1] != "surprised", line
            if line[1] == what and rank in {None, line[0]}:
                return line[2]

    def wait_for_all(self, what, ranks):
        """Return when each of these has said it."""
        for rank in ranks:
            if rank not in self.words(what):
                self.wait_for(what, rank)

    def words(self, what):
        """By rank, what each said last of this kind."""
        return {rank: words for rank, kind, words in self.said if kind == what}

    def kill(self, ranks):
        """SIGKILL."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def close(self):
        """End everything."""
        self.kill(range(len(self._pids)))
        self._process.kill()
        self._process.wait()


# --- the program -----------------------------------------------------------------------------------------------------


def say(*words):
    os.write(1, (" ".join(str(word).replace("\n", " ") for word in words)[:1500] + "\n").encode())


def be_rank(job, rank):
    try:
        mesh = None
        if job.world > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{job.meet}", rank=rank, world_size=job.world, timeout=timedelta(seconds=60)
            )
            mesh = init_device_mesh("cpu", (job.world,))
        manager = manager_of(job)
        say(rank, "joined")
        state = state_of(0, rank, job.world, mesh)
        step = manager.restore(state)
        if step is not None:
            check(state, rank, job.world, mesh)
        say(rank, "restored", step or 0, state["value"])
        step, value = step or 0, job.value
        while not job.saves or value < job.value + job.saves:
            step = step if job.again and step else step + 1
            say(rank, "begins", step, value)
            manager.save(step, state_of(value, rank, job.world, mesh))
            manager.wait()
            say(rank, "saved", step, value)
            value += 1
        if job.world > 1:
            dist.barrier()
        os._exit(0)
    except CheckpointError as error:
        say(rank, "failed", type(error).__name__, error)
        if job.linger:
            signal.pause()
        os._exit(FAILED)
    except BaseException as error:  # noqa: BLE001 - the test is to hear of anything
        say(rank, "surprised", repr(error))
        os._exit(SURPRISED)


def serve():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # a rank's first DTensor imports it, which takes it more than a second
    for line in sys.stdin:
        job = Job(**json.loads(line))
        pids = []
        for rank in range(job.world):
            pid = os.fork()
            if pid == 0:
                be_rank(job, rank)
            pids.append(pid)
        say(-1, "forked", *pids)
        say(-1, "ended", *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    serve()
