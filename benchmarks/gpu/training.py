"""DDP, FSDP2 and DeepSpeed ZeRO: killed in the middle, resumed, and the same losses to the bit as never killed.

Small files on a volume are decoded by loader workers, the checkpoint is CheckpointManager's, and the kill is a SIGKILL
that a rank gets right after a step, while a save may be under way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import airdata
import airdist
from airdata.checkpoint import PerRank
from gpu.machine import Setting, in_parts, join
from gpu.results import Result, publish

BATCH, STEPS_PER_EPOCH, EPOCHS = 16, 8, 3
SAVE_EVERY, KILL_AFTER = 5, 13
WIDTH, CLASSES = 256, 10


def measure(setting: Setting) -> None:
    """Each way of training: once through, once killed, once resumed."""
    write_files(setting.path("files"), BATCH * setting.ranks * STEPS_PER_EPOCH)
    in_parts(*(lambda how=how: publish(setting.report, one_way(setting, how)) for how in MAKERS))


def one_way(setting: Setting, how: str) -> Result:
    """The answer for DDP, say."""
    if how.startswith("DeepSpeed") and importlib.util.find_spec("deepspeed") is None:
        return Result(how, ["what"], [["left out: deepspeed is not installed"]])
    began = time.monotonic()
    row, whole = compare(setting, how)
    result = Result(
        f"{how}, killed and resumed, {setting.ranks} ranks, {STEPS_PER_EPOCH * EPOCHS} steps",
        ["killed", "resumed at", "losses", "equal to the bit", "last loss", "s for the three launches"],
        [[*row, time.monotonic() - began]],
    )
    result.checks.append(("the same losses as without the kill, on every rank", whole))
    return result


def compare(setting: Setting, how: str) -> tuple[list[object], bool]:
    """Train through, and killed and resumed; the row of the table, and whether every loss is the same."""
    # The workspace makes cuBLAS deterministic; without it torch refuses the deterministic mode. The level leaves out
    # DDP's advice on a setting that is as it is on purpose.
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    launch = setting.launcher(env=env)(train).distributed
    folder = setting.path(how.replace(" ", "-"))
    launch(setting, how, f"{folder}/through", KILL_AFTER * 1000)
    killed = "nobody"
    try:
        launch(setting, how, f"{folder}/killed", KILL_AFTER)
    except airdist.RankDiedError as error:
        killed = f"rank {error.rank} after step {KILL_AFTER}"
    (resumed, *_) = launch(setting, how, f"{folder}/killed", KILL_AFTER * 1000)
    through, pieced = losses(f"{folder}/through"), losses(f"{folder}/killed")
    same = sum(through.get(place) == loss for place, loss in pieced.items())
    total = EPOCHS * STEPS_PER_EPOCH * setting.ranks
    last = float.fromhex(through[0, EPOCHS * STEPS_PER_EPOCH])
    whole = same == len(pieced) == len(through) == total and resumed > 0 and killed != "nobody"
    return [killed, resumed, len(pieced), same, last], whole


def losses(folder: str) -> dict[tuple[int, int], str]:
    """Loss by rank and step, as hexadecimal text: of the last attempt that took the step."""
    found: dict[tuple[int, int], str] = {}
    for path in sorted(Path(folder).glob("*.jsonl"), key=lambda path: int(path.stem.split("-from-")[1])):
        rank = int(path.stem.split("-")[1])
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    step, loss = json.loads(line)
                    found[rank, step] = loss
    return found


# --- data ------------------------------------------------------------------------------------------------------------


def write_files(folder: str, count: int) -> None:
    """Small files with noise around their class's own pattern."""
    random = np.random.default_rng(0)
    patterns = random.standard_normal((CLASSES, WIDTH)).astype(np.float32)
    for number in range(count):
        label = number % CLASSES
        path = Path(folder, str(label), f"{number:05d}.f32")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((patterns[label] + 2 * random.standard_normal(WIDTH).astype(np.float32)).tobytes())


class Vectors(IterableDataset):
    """(numbers, label) of each file."""

    def __init__(self, files: airdata.UCVolumeDataset) -> None:
        self.files = files

    def __iter__(self):
        for path in self.files:
            yield torch.from_numpy(np.fromfile(path, dtype=np.float32)), int(Path(path).parts[-2])


# --- in a rank -------------------------------------------------------------------------------------------------------


def train(setting: Setting, how: str, folder: str, kill_after: int) -> int:
    """Train to the end, or until this rank is killed; the step that it resumed from."""
    warnings.simplefilter("ignore")
    device = join(setting.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(mode=True)
    step_once, parts = MAKERS[how](network().to(device), device)
    torch.manual_seed(1 + rank)  # another dropout in each rank
    files = airdata.UCVolumeDataset(setting.path("files"), shuffle=True, seed=7, uneven="drop")
    loader = airdata.DataLoader(Vectors(files), batch_size=BATCH, num_workers=2)
    manager = airdata.CheckpointManager(f"{folder}/steps", keep_last=2)
    state = {**parts, "loader": loader, "rng": airdata.RNGState()}
    start = step = manager.restore(state) or 0
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/rank-{rank}-from-{start}.jsonl", "w", encoding="utf-8") as lines:
        while step < STEPS_PER_EPOCH * EPOCHS:
            for numbers, labels in loader:
                loss = step_once(numbers.to(device, non_blocking=True), labels.to(device, non_blocking=True))
                step += 1
                lines.write(json.dumps([step, loss.hex()]) + "\n")
                lines.flush()
                if step == kill_after and rank == world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % SAVE_EVERY == 0:
                    manager.save(step, state)
    manager.close()
    dist.destroy_process_group()
    return start


def network() -> nn.Module:
    """Layers with dropout, so that the random numbers count."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def ddp(model: nn.Module, device: torch.device) -> tuple[Any, dict[str, Any]]:
    # By default DDP sorts its buckets anew after its first step. Sums over three ranks or more would then be taken in
    # another order in the step after a resume than in a run that was not stopped, and differ in their last bits.
    ids = [device] if device.type == "cuda" else None
    return plain_step(DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True))


def fsdp2(model: nn.Module, device: torch.device) -> tuple[Any, dict[str, Any]]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model)


def plain_step(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(numbers: torch.Tensor, labels: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(model(numbers), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, {"model": model, "optimizer": optimizer}


class OwnShard:
    """What ZeRO keeps on this rank: its share of the optimizer, which only the same number of ranks can take up."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        base = self.optimizer.optimizer.state_dict()
        return {"base": base, "weights": [part.detach().clone() for part in self._parts()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.optimizer.load_state_dict(state["base"])
        with torch.no_grad():
            for part, saved in zip(self._parts(), state["weights"], strict=True):
                part.copy_(saved)

    def _parts(self) -> list[torch.Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


def deepspeed_zero(model: nn.Module, _device: torch.device) -> tuple[Any, dict[str, Any]]:
    deepspeed = importlib.import_module("deepspeed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(numbers: torch.Tensor, labels: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(engine(numbers), labels)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, {"model": engine.module, "zero": PerRank(OwnShard(engine.optimizer))}


MAKERS = {"DDP": ddp, "FSDP2": fsdp2, "DeepSpeed ZeRO-1": deepspeed_zero}
