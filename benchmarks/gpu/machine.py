"""What is measured on: the setting of a run, the ranks' way into their world, and what the driver says of the GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airdist import distributed, runtime


@dataclass(frozen=True)
class Setting:
    """What a section is told.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        ranks: processes, one for each GPU.
        gib: bytes of state over all ranks, in GiB.
        work: a directory of the section's own, on the disk that is measured.
        report: the file that results are appended to.
        deadline: when the section should be through, on the clock of ``time.monotonic``, which processes share.
        small: whether this is a trial of the script, whose numbers mean nothing.
    """

    device: str
    ranks: int
    gib: float
    work: str
    report: str
    deadline: float
    small: bool

    def path(self, name: str) -> str:
        """A path in the work directory."""
        return os.path.join(self.work, name)

    def launcher(self, ranks: int | None = None, **options: Any) -> Any:
        """``distributed`` for this machine: that many ranks (default: all), on the CPU where that is asked for."""
        env = dict(options.pop("env", {}))
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        options = {"timeout": 600, "tracking": False, "logs": "all", **options}
        return distributed(num_accelerators=ranks or self.ranks, env=env, **options)


def join(device: str) -> Any:
    """Take this rank's device, start the process group, and return the device."""
    import torch
    import torch.distributed as dist

    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", runtime.get_local_rank())
    torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return own


def synchronize(device: Any) -> None:
    """Wait for this rank's GPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def across(value: float, how: str = "MAX") -> float:
    """The largest value over all ranks (or ``"SUM"``, ``"MIN"``), through the hosts; also a barrier."""
    import torch
    import torch.distributed as dist

    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, getattr(dist.ReduceOp, how))
    return float(number.item())


def seconds_left(setting: Setting) -> float:
    """Until the deadline, the same on every rank."""
    return across(setting.deadline - time.monotonic(), "MIN")


def in_parts(*parts: Callable[[], object]) -> None:
    """Give every part its turn, whatever happens in those before; the first failure is raised at the end."""
    failures: list[BaseException] = []
    for part in parts:
        try:
            part()
        except BaseException as failure:  # noqa: BLE001, PERF203 - raised below; that of DCP is no Exception
            traceback.print_exc()
            failures.append(failure)
    if failures:
        raise failures[0]


def gpu_processes() -> set[int]:
    """Pids that hold a CUDA context, as the driver lists them."""
    return {int(pid) for pid in _ask("--query-compute-apps=pid")}


def gpu_memory() -> list[int]:
    """MiB in use on every GPU."""
    return [int(used) for used in _ask("--query-gpu=memory.used")]


def visible_gpus() -> list[str]:
    """Names of the GPUs that a launch would take."""
    from airdist.devices import select_visible
    from airdist.driver import query_devices

    found = select_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), query_devices(os.environ))
    return [device.name for device, _ in found]


def describe(setting: Setting) -> dict[str, object]:
    """The kind of machine."""
    import torch

    driver = sorted(set(_ask("--query-gpu=driver_version")))
    with open("/proc/meminfo", encoding="ascii") as lines:
        memory = int(next(lines).split()[1]) / 2**20
    return {
        "GPUs": ", ".join(visible_gpus()) if setting.device == "cuda" else "none (CPU)",
        "driver": ", ".join(driver),
        "ranks": setting.ranks,
        "state, GiB": setting.gib,
        "cores": os.cpu_count(),
        "memory now, GiB": round(memory),
        "disk": _filesystem(setting.work),
        "free on it, GiB": round(shutil.disk_usage(setting.work).free / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _filesystem(path: str) -> str:
    """Type of the file system that a path lies on: the mount with the longest name above it."""
    with open("/proc/mounts", encoding="utf-8") as lines:
        mounts = [line.split()[1:3] for line in lines]
    path = os.path.realpath(path)
    above = [mount for mount in mounts if path == mount[0] or path.startswith(mount[0].rstrip("/") + "/")]
    return max(above, key=lambda mount: len(mount[0]))[1]


def _ask(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
