"""Which accelerators of this machine a launch gets.

A launch asks `allocate(8, "GPU_8xH100", environ=...)`. What the driver reports (`airdist.driver`) is narrowed by
`CUDA_VISIBLE_DEVICES` under CUDA's own rules (`select_visible`), the request is checked against what is left, and an
`Allocation` says how many ranks to start and what each may see. Everything after the driver's answer is pure.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from airdist.driver import Device, model_of, query_devices
from airdist.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["AcceleratorType", "Allocation", "Device", "GPUType", "allocate", "check_accelerator_type", "select_visible"]

logger = logging.getLogger("airdist")


class AcceleratorType(str, Enum):
    """A kind of node: the number of its GPUs and their model. Any other is the string `GPU_<GPUs per node>x<model>`."""

    GPU_1xA10 = "GPU_1xA10"
    GPU_1xH100 = "GPU_1xH100"
    GPU_8xH100 = "GPU_8xH100"
    GPU_8xB300 = "GPU_8xB300"

    __str__ = str.__str__


class GPUType(str, Enum):
    """A GPU model, for the older argument `gpu_type`."""

    A10 = "A10"
    H100 = "H100"
    B300 = "B300"

    __str__ = str.__str__


@dataclass(frozen=True)
class Allocation:
    """What the ranks of one node get.

    Attributes:
        nprocs: Ranks on this node.
        visible: Value for every rank's `CUDA_VISIBLE_DEVICES`; None means leave the variable alone (no accelerator).
            Ranks of a node share the list and pick by `LOCAL_RANK`: a mask for each rank slows or breaks NCCL on
            NVSwitch machines (NVIDIA-NeMo/RL#2252).
        per_rank_visible: One mask for each local rank, where masks were asked for or are the only thing that works: a
            process can use no more than one MIG instance (pytorch/pytorch#130181). Takes the place of `visible`.
        accelerator_type: What the machine is, such as `GPU_8xH100`; None without accelerators or with mixed models.
    """

    nprocs: int
    visible: str | None = None
    per_rank_visible: tuple[str, ...] | None = None
    accelerator_type: str | None = None


def allocate(
    num_accelerators: int | None,
    accelerator_type: AcceleratorType | str | None,
    *,
    isolate: bool = False,
    environ: Mapping[str, str],
) -> Allocation:
    """Give a launch its accelerators on this machine, or say why it cannot have them.

    Args:
        num_accelerators: Ranks wanted; None means one for each visible accelerator, or one if there is none.
        accelerator_type: What the machine must be: `GPU_8xH100` (8 GPUs, of which fewer may be used), `H100` (any
            number), or None (anything).
        isolate: Let each rank see its own accelerator only, as device 0.
        environ: The caller's environment, for `CUDA_VISIBLE_DEVICES`, `PATH` and `AIRDIST_DEVICE_TIMEOUT` (seconds).

    Returns:
        The allocation. Without accelerators it is `num_accelerators` (or one) CPU processes.

    Raises:
        DeviceError: More accelerators than are visible, a type that is not attached, or a driver that does not answer.
        ValueError: `accelerator_type` is not the name of one.
    """
    wanted = check_accelerator_type(accelerator_type)
    if num_accelerators is not None and num_accelerators < 1:
        raise DeviceError(f"num_accelerators={num_accelerators}: a launch needs at least one process.")
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    # A mask that hides everything needs no answer from the driver, and is the way round one that is broken.
    machine = () if mask is not None and not _tokens(mask) else query_devices(environ)
    visible = select_visible(mask, machine)
    if not visible:
        if wanted is not None:
            raise DeviceError(_no_such_thing(wanted, mask))
        return Allocation(nprocs=num_accelerators or 1)
    devices = [device for device, _ in visible]
    if num_accelerators is not None and num_accelerators > len(visible):
        hidden = f", because CUDA_VISIBLE_DEVICES={mask!r}" if len(visible) < len(machine) else ""
        raise DeviceError(
            f"num_accelerators={num_accelerators}, but {len(visible)} accelerator(s) are visible{hidden}: "
            f"{_listing(devices)}. Ask for {len(visible)} or fewer, or leave it out to use all."
        )
    chosen = visible[:num_accelerators]
    attached = _type_of_machine(machine)
    _check_type(wanted, attached, devices[: len(chosen)], _gpu_count(machine))
    masks = tuple(token for _, token in chosen)
    masked = isolate or any(device.parent for device, _ in chosen)
    return Allocation(len(chosen), ",".join(masks), masks if masked else None, attached)


def check_accelerator_type(value: object) -> str | None:
    """Bring the name of an accelerator to its normal form.

    Args:
        value: None, an `AcceleratorType`, a `GPUType`, or such a name in any case: `"GPU_8xH100"`, `"h100"`.

    Returns:
        `GPU_<n>x<model>`, or a model alone, or None.

    Raises:
        ValueError: It is none of these; the message names what is accepted.
    """
    if value is None:
        return None
    text = value.value if isinstance(value, Enum) else value
    if isinstance(text, str):
        match = re.fullmatch(r"(?:GPU_([1-9][0-9]?)X)?([A-Z]{1,6}[0-9]{1,4}[A-Z]?)", text.strip().upper())
        if match:
            count, model = match.groups()
            return f"GPU_{count}x{model_of(model)}" if count else model_of(model)
    raise ValueError(
        f"{value!r} is not an accelerator type. Accepted are {', '.join(AcceleratorType)}, the general form "
        f"GPU_<GPUs per node>x<model>, or a model alone ({', '.join(GPUType)}, ...)."
    )


def select_visible(mask: str | None, machine: Sequence[Device]) -> list[tuple[Device, str]]:
    """Apply CUDA's rules for `CUDA_VISIBLE_DEVICES` to the devices of a machine.

    Entries are indices or UUIDs (or a unique beginning of one), divided by commas. As in CUDA, the first entry that
    names nothing ends the list, and a list with duplicates is empty. An index or UUID of a GPU in MIG mode stands for
    its instances, because the GPU itself cannot be used then.

    Args:
        mask: The variable's value; None if it is not set.
        machine: What the driver reports, in its order.

    Returns:
        The visible devices, each with the token that selects it: the caller's own, or an index, or an instance's UUID.
    """
    if mask is None:
        return [(device, device.uuid if device.parent else str(device.index)) for device in machine]
    chosen: list[tuple[Device, str]] = []
    for token in _tokens(mask):
        found = _named(token, machine)
        if not found:
            logger.warning(
                "CUDA_VISIBLE_DEVICES=%s: %r names no device here; CUDA ignores it and what follows.", mask, token
            )
            break
        chosen += [(device, device.uuid if device.parent else token) for device in found]
    if len({device.uuid for device, _ in chosen}) < len(chosen):
        logger.warning("CUDA_VISIBLE_DEVICES=%s names a device twice; CUDA shows none then.", mask)
        return []
    return chosen


def _tokens(mask: str) -> list[str]:
    """The entries up to the first that is empty or negative: both end the list (`-1` is the usual way to say none)."""
    tokens = []
    for entry in mask.split(","):
        token = entry.strip()
        if not token or token.startswith("-"):
            break
        tokens.append(token)
    return tokens


def _named(token: str, machine: Sequence[Device]) -> list[Device]:
    if token.isdecimal():
        return [device for device in machine if device.index == int(token)]
    if token.startswith("MIG-"):
        found = [device for device in machine if device.uuid.startswith(token)]
        return found if len(found) == 1 else []
    owners = {device.parent or device.uuid for device in machine}
    owner = [uuid for uuid in owners if uuid.startswith(token)]
    return [device for device in machine if owner == [device.parent or device.uuid]]


def _gpu_count(machine: Sequence[Device]) -> int:
    return len({device.parent or device.uuid for device in machine})


def _type_of_machine(machine: Sequence[Device]) -> str | None:
    models = {device.model for device in machine}
    return f"GPU_{_gpu_count(machine)}x{models.pop()}" if len(models) == 1 else None


def _listing(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.index}: {device.name}" for device in devices)


def _no_such_thing(wanted: str, mask: str | None) -> str:
    why = (
        f"CUDA_VISIBLE_DEVICES={mask!r} leaves none" if mask is not None else "the driver reports none on this machine"
    )
    return (
        f"accelerator_type={wanted!r} was asked for, but no accelerator is visible: {why}. "
        "Leave accelerator_type out to run on the CPU."
    )


def _check_type(wanted: str | None, attached: str | None, chosen: Sequence[Device], gpus: int) -> None:
    if wanted is None:
        return
    # A model is in capitals, so that the small x is the one between count and model.
    count, _, model = wanted.rpartition("x")
    if any(device.model != model for device in chosen) or (count and count != f"GPU_{gpus}"):
        raise DeviceError(
            f"accelerator_type={wanted!r} was asked for, but this machine is {attached or 'of mixed models'} "
            f"({_listing(chosen)}). Attach the one asked for, or leave accelerator_type out."
        )
