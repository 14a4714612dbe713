"""What the GPU driver reports about this machine, through the program `nvidia-smi`.

`query_devices` asks for the GPUs and for the processes that use them, side by side (27 ms on an H200 node); for a GPU
in MIG mode a second question lists its instances. What comes back is a tuple of `Device`, in the driver's order. The
driver is asked in a process of its own, never through a library, because a call into a wedged driver cannot be
interrupted, whereas a process can be abandoned; and never through torch or CUDA, because a caller that initialises CUDA
holds memory on a GPU that its ranks need.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from airdist.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Device", "model_of", "query_devices"]

logger = logging.getLogger("airdist")

# Without persistence mode each call wakes every GPU, which takes a second or more for each.
_TIMEOUT = 30.0
_DRIVER_UNREACHABLE = 9  # nvidia-smi's status when the driver is not loaded
_NOTHING_FOUND = 6  # and when there is no device
_CONTROL_FILE = Path("/dev/nvidiactl")
_ALIASES = {"A10G": "A10"}  # AWS's variant of the A10; its nodes are sold, and asked for, as A10


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG instance of a GPU.

    Attributes:
        index: The GPU's number in `nvidia-smi`'s order (by PCI bus; CUDA's own order is the same where all GPUs are
            of one model, or with `CUDA_DEVICE_ORDER=PCI_BUS_ID`). A MIG instance has its GPU's.
        uuid: `GPU-…` or `MIG-…`; either may stand in `CUDA_VISIBLE_DEVICES`.
        name: The driver's name, such as `NVIDIA H100 80GB HBM3`.
        memory_total: Bytes on the GPU; 0 where the driver does not tell (MIG instances, GPUs that share the host's).
        parent: For a MIG instance the UUID of its GPU, else None.
    """

    index: int
    uuid: str
    name: str
    memory_total: int = 0
    parent: str | None = None

    @property
    def model(self) -> str:
        """The model, such as `H100`."""
        return model_of(self.name)


def model_of(name: str) -> str:
    """The model in a driver's device name: `NVIDIA H100 80GB HBM3` is `H100`, `NVIDIA A100-SXM4-40GB` is `A100`.

    Workstation boards keep the family that precedes the number: `NVIDIA RTX A6000` is `RTXA6000`. `A10G` is `A10`.
    """
    model = ""
    for word in re.sub(r"\b(NVIDIA|Tesla|Quadro|GeForce|GRID)\b", " ", name).split():
        model += word.split("-")[0].upper()
        if re.search(r"\d", model):
            break
    return _ALIASES.get(model, model)


def query_devices(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Ask for every GPU of this machine (for one in MIG mode: its instances), whatever `CUDA_VISIBLE_DEVICES` says.

    Warns, on the logger `airdist`, if the calling process itself holds memory on one: its ranks will miss that memory.

    Args:
        environ: Where `PATH` and `AIRDIST_DEVICE_TIMEOUT` (seconds, default 30) are read; passed on to the program.

    Raises:
        DeviceError: `nvidia-smi` does not answer in time, fails, or answers something else than documented.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        if _CONTROL_FILE.exists():
            logger.warning(
                "%s exists, but nvidia-smi is not on PATH: GPUs cannot be counted, and the launch runs as on a CPU. "
                "In a container add `utility` to NVIDIA_DRIVER_CAPABILITIES.",
                _CONTROL_FILE,
            )
        return ()
    style = "--format=csv,noheader,nounits"
    gpu_answer, app_answer = _ask(
        [program, "--query-gpu=index,uuid,name,memory.total,mig.mode.current", style],
        [program, "--query-compute-apps=pid,gpu_uuid,used_memory", style],
        environ=environ,
    )
    gpus, mig = _parse_gpus(gpu_answer.checked())
    if mig:
        (listing,) = _ask([program, "-L"], environ=environ)
        gpus = _with_instances(gpus, mig, listing.checked())
    if app_answer.status == 0:
        _warn_of_own_memory(app_answer.text)
    return tuple(gpus)


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str

    def checked(self) -> str:
        if self.status == 0:
            return self.text
        said = " ".join(self.text.split()) or "nothing"
        if self.status in (_DRIVER_UNREACHABLE, _NOTHING_FOUND):
            # A machine image with the driver's tools on a node without a GPU: common, and no reason not to train.
            logger.warning("nvidia-smi found no usable GPU (it said: %s); the launch runs on the CPU.", said)
            return ""
        raise DeviceError(f"nvidia-smi failed with status {self.status} and said: {said}")


def _ask(*questions: Sequence[str], environ: Mapping[str, str]) -> list[_Answer]:
    """Run the questions side by side, for no longer than the time-out; the answers in their order."""
    seconds = _timeout(environ)
    deadline = time.monotonic() + seconds
    running: list[subprocess.Popen[str]] = []
    try:
        for question in questions:
            process = subprocess.Popen(
                question,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environ, "LC_ALL": "C"},
                text=True,
                errors="replace",
                start_new_session=True,
            )
            running.append(process)
        answers = []
        for process in running:
            text, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            answers.append(_Answer(process.returncode, text))
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"{questions[0][0]} gave no answer in {seconds:g} s: the GPU driver is busy or hangs. "
            "AIRDIST_DEVICE_TIMEOUT=<seconds> waits longer; CUDA_VISIBLE_DEVICES='' runs on the CPU without asking."
        ) from error
    except OSError as error:
        raise DeviceError(f"{questions[0][0]} cannot be run: {error}") from error
    finally:
        for process in running:
            _abandon(process)
    return answers


def _abandon(process: subprocess.Popen[str]) -> None:
    """End a process that may be stuck in the driver, and do not wait for it if it is."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
    if process.stdout is not None:
        process.stdout.close()


def _timeout(environ: Mapping[str, str]) -> float:
    text = environ.get("AIRDIST_DEVICE_TIMEOUT", "")
    try:
        return float(text) if text else _TIMEOUT
    except ValueError:
        raise DeviceError(f"AIRDIST_DEVICE_TIMEOUT={text!r} is not a number of seconds.") from None


def _rows(text: str) -> list[list[str]]:
    return [[field.strip() for field in line.split(",")] for line in text.splitlines() if line.strip()]


def _parse_gpus(text: str) -> tuple[list[Device], set[str]]:
    """The GPUs, and the UUIDs of those in MIG mode."""
    gpus, mig = [], set()
    for row in _rows(text):
        if row == ["No devices were found"]:
            continue
        try:
            index, uuid, name, memory, mode = row
            gpus.append(Device(int(index), uuid, name, int(memory) << 20 if memory.isdigit() else 0))
        except ValueError:
            raise DeviceError(
                f"nvidia-smi said {', '.join(row)!r} when asked for a GPU's index, UUID and name."
            ) from None
        if mode == "Enabled":
            mig.add(uuid)
    return gpus, mig


def _with_instances(gpus: Sequence[Device], mig: set[str], listing: str) -> list[Device]:
    """Put in place of each GPU in MIG mode the instances that `nvidia-smi -L` lists below it."""
    instances: dict[str, list[Device]] = {}
    gpu = None
    for line in listing.splitlines():
        match = re.match(r"\s*(GPU|MIG)\s+(.*?)\s*(?:Device\s+)?\d+:.*\(UUID:\s*([^)\s]+)\)", line)
        if match is None:
            continue
        kind, profile, uuid = match.groups()
        if kind == "GPU":
            gpu = next((device for device in gpus if device.uuid == uuid), None)
        elif gpu is not None:
            part = replace(gpu, uuid=uuid, name=f"{gpu.name} MIG {profile}", memory_total=0, parent=gpu.uuid)
            instances.setdefault(gpu.uuid, []).append(part)
    devices: list[Device] = []
    for device in gpus:
        devices += instances.get(device.uuid, []) if device.uuid in mig else [device]
    if not devices:
        raise DeviceError("Every GPU is in MIG mode and has no instance: create some with `nvidia-smi mig -cgi … -C`.")
    return devices


def _warn_of_own_memory(apps: str) -> None:
    for row in _rows(apps):
        if row[0] == str(os.getpid()):
            logger.warning(
                "This process holds %s MiB on %s, which its ranks will miss: a notebook that has used CUDA keeps "
                "cached memory until torch.cuda.empty_cache() is called, and its CUDA context until it is restarted.",
                row[-1],
                row[1],
            )
