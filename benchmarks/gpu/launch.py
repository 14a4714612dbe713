"""Launching: which GPUs, what a caller that has used CUDA may do, how fast, and what is left on the GPUs afterwards.

Every end of a launch is made to happen: a return, an exception, a cancel, SIGKILL of the caller and of one rank. Then
the ranks' pids and the driver's list of processes are watched until nothing of the launch is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airdist import DeviceError, distributed
from gpu.first_line import first_lines
from gpu.machine import Setting, gpu_memory, gpu_processes, in_parts, join, visible_gpus
from gpu.results import Result, publish

LIMIT = 5.0  # seconds that a process of a launch may outlive it
_START = 120.0
_SLACK_MIB = 32  # of 256 that each rank takes; the driver's own tables come and go
_GLOO_RANKS = 8


def measure(setting: Setting) -> None:
    """All questions."""
    in_parts(
        *(
            lambda question=question: publish(setting.report, question(setting))
            for question in (who_is_there, what_is_left, first_lines)
        )
    )


# --- devices ---------------------------------------------------------------------------------------------------------


def who_is_there(setting: Setting) -> Result:
    """A launch without arguments, from a process that has used CUDA; and one that asks for what is not there."""
    if setting.device == "cuda":
        import torch

        torch.ones(1, device="cuda")
    # No number: the point is what a launch takes by itself. Without GPUs that would be one process.
    launch = distributed(tracking=False) if setting.device == "cuda" else setting.launcher()
    results = launch(introduce).distributed(setting.device)
    refused = "it was not"
    try:
        setting.launcher(accelerator_type="GPU_64xA10")(introduce).distributed(setting.device)
    except DeviceError as error:
        refused = str(error)
    result = Result("A launch takes every visible accelerator", ["rank", "device", "sum of ranks", "backend"])
    result.rows = [[rank, *values] for rank, values in enumerate(results)]
    expected = (
        [f"cuda:{n}" for n in range(len(visible_gpus()))] if setting.device == "cuda" else ["cpu"] * setting.ranks
    )
    result.checks = [
        (f"{len(expected)} ranks, each on its own device", [r[0] for r in results] == expected),
        ("all-reduce", all(r[1] == sum(range(len(results))) for r in results)),
        (f"another accelerator is refused: {refused}", refused != "it was not"),
    ]
    if setting.device == "cuda":
        result.checks.append(("the caller had initialised CUDA before, and still uses it", uses_cuda()))
    return result


def uses_cuda() -> bool:
    import torch

    return bool(torch.ones(2, device="cuda").sum().item() == 2)


def introduce(device: str) -> tuple[str, int, str]:
    import torch
    import torch.distributed as dist

    own = join(device)
    total = torch.tensor([dist.get_rank()], device=own)
    dist.all_reduce(total)
    answer = str(own), int(total.item()), dist.get_backend_config()
    dist.destroy_process_group()
    return answer


# --- what is left ----------------------------------------------------------------------------------------------------


def what_is_left(setting: Setting) -> Result:
    """Every way a launch can end, and how long something of it stays."""
    result = Result(
        "What a launch leaves behind", ["how it ended", "ranks", "caller saw", "until nothing is left, s", "MiB kept"]
    )
    ends: dict[str, Callable[..., tuple[str, float]]] = {
        "return": by_return,
        "exception on rank 0": by_exception,
        "cancel": by_cancel,
        "SIGKILL of the caller": by_kill_of_caller,
        "SIGKILL of a rank": by_kill_of_rank,
    }
    for name, end in ends.items():
        before = on_the_gpus()
        folder = setting.path(name.replace(" ", "-"))
        os.mkdir(folder)
        seen, ended = end(setting, folder)
        seconds = wait_until(lambda folder=folder, before=before: gone(folder, before), ended)
        result.rows.append([name, len(pids(folder)), seen, seconds, on_the_gpus()[1] - before[1]])
        if setting.device == "cpu" or setting.ranks > 1 or name != "SIGKILL of a rank":
            result.check_at_most(f"{name}: seconds until nothing is left", seconds, LIMIT)
    if setting.device == "cuda" and setting.ranks == 1:
        ranks = _GLOO_RANKS
        folder = setting.path("gloo")
        os.mkdir(folder)
        seen, ended = by_kill_of_rank(setting, folder, ranks)
        seconds = wait_until(lambda: not alive(pids(folder)), ended)
        result.rows.append(["SIGKILL of a rank, gloo on the CPU", ranks, seen, seconds, "-"])
        result.check_at_most("a killed rank ends the others: seconds", seconds, LIMIT)
    if setting.device == "cuda":
        result.notes.append(
            "nothing: no rank is alive, the driver lists no process and no memory that was not there before"
        )
        if os.getpid() not in gpu_processes():
            result.notes.append("the driver lists no processes on this machine: memory alone tells")
    return result


def on_the_gpus() -> tuple[set[int], int]:
    """Processes on the GPUs, and MiB in use on all of them."""
    return gpu_processes(), sum(gpu_memory())


def gone(folder: str, before: tuple[set[int], int]) -> bool:
    """Whether no rank that left its pid in the folder is alive, and the GPUs are as they were."""
    if alive(pids(folder)):
        return False
    processes, used = on_the_gpus()
    return processes <= before[0] and used - before[1] <= _SLACK_MIB


def hold(folder: str, device: str, *, fail: bool = False, stay: bool = True) -> None:
    """Take the GPU and memory on it, say so, and end as told: most ranks block in native code."""
    import torch
    import torch.distributed as dist

    own = join(device)
    kept = torch.ones(64 << 20 if own.type == "cuda" else 1, device=own)
    dist.all_reduce(kept[:1])
    if own.type == "cuda":
        torch.cuda.synchronize()
    note = Path(folder, f"{dist.get_rank()}.tmp")
    note.write_text(str(os.getpid()))
    note.rename(note.with_suffix(".pid"))
    if fail and dist.get_rank() == 0:
        # Only once all have said where they are: what is watched afterwards is these pids.
        wait_for_pids(folder, dist.get_world_size())
        raise ValueError("on purpose")
    if stay:
        if fail or dist.get_rank():
            dist.recv(torch.zeros(1), src=0)  # of what is never sent
        time.sleep(600)


def by_return(setting: Setting, folder: str) -> tuple[str, float]:
    setting.launcher()(hold).distributed(folder, setting.device, stay=False)
    return "a list", time.monotonic()


def by_exception(setting: Setting, folder: str) -> tuple[str, float]:
    try:
        setting.launcher()(hold).distributed(folder, setting.device, fail=True)
    except ValueError as error:
        return repr(error), time.monotonic()
    return "nothing", time.monotonic()


def by_cancel(setting: Setting, folder: str) -> tuple[str, float]:
    handle = setting.launcher(grace_seconds=1)(hold).submit(folder, setting.device)
    wait_for_pids(folder, setting.ranks)
    ended = time.monotonic()
    handle.cancel()
    error = handle.exception(_START)
    return type(error).__name__, ended


def by_kill_of_caller(setting: Setting, folder: str) -> tuple[str, float]:
    import json
    from dataclasses import asdict

    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from gpu.launch import hold, Setting\n"
        "s = Setting(**json.loads(sys.argv[2])); s.launcher()(hold).distributed(sys.argv[3], s.device)"
    )
    arguments = [str(Path(__file__).parents[1]), json.dumps(asdict(setting)), folder]
    caller = subprocess.Popen([sys.executable, "-c", code, *arguments])
    try:
        wait_for_pids(folder, setting.ranks)
    finally:
        caller.kill()
        ended = time.monotonic()
        caller.wait()
    return "-", ended


def by_kill_of_rank(setting: Setting, folder: str, gloo_ranks: int | None = None) -> tuple[str, float]:
    env = {"CUDA_VISIBLE_DEVICES": ""} if gloo_ranks else {}
    launcher = setting.launcher(gloo_ranks, env=env)
    handle = launcher(hold).submit(folder, "cpu" if gloo_ranks else setting.device)
    ranks = gloo_ranks or setting.ranks
    wait_for_pids(folder, ranks)
    os.kill(int(Path(folder, f"{ranks - 1}.pid").read_text()), signal.SIGKILL)
    ended = time.monotonic()
    error: Any = handle.exception(_START)
    return f"{type(error).__name__}, rank {getattr(error, 'rank', '?')}, after {time.monotonic() - ended:.2f} s", ended


def pids(folder: str) -> list[int]:
    return [int(path.read_text()) for path in Path(folder).glob("*.pid")]


def wait_for_pids(folder: str, ranks: int) -> None:
    if wait_until(lambda: len(pids(folder)) >= ranks, time.monotonic(), _START) >= _START:
        raise TimeoutError(f"{len(pids(folder))} of {ranks} ranks came up within {_START:.0f} s")


def alive(processes: list[int]) -> list[int]:
    """Those that have not ended; one that waits for its parent to look holds nothing any more."""
    left = []
    for pid in processes:
        with contextlib.suppress(OSError):
            if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.append(pid)
    return left


def wait_until(condition: Callable[[], bool], since: float, limit: float = 30.0) -> float:
    """Seconds from ``since`` until the condition holds; no longer than the limit."""
    while not condition():
        if time.monotonic() - since > limit:
            return limit
        time.sleep(0.02)
    return time.monotonic() - since
