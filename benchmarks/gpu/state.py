"""A model and its optimizer of a given size whose every number is known, so that a checkpoint's bits can be checked.

Each element is a pure function of its tensor, its place in the whole tensor and a salt. A rank can therefore make and
check its own shard, on any world size, without the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

_LAYERS = 32
_COPIES = 3  # AdamW keeps two numbers for each weight
_MIX = 2654435761  # Knuth's multiplier: neighbours differ in their high bits
_POSITIVE_AND_FINITE = 0x3FFFFFFF  # as bits of a float32


@dataclass
class State:
    """A stack of square layers under AdamW, in float32; sharded by FSDP2 when there is more than one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, gib: float, device: torch.device) -> State:
        """About that many GiB over all ranks; nothing is ever whole on one of them."""
        width = max(64, int((gib * 2**30 / 4 / _COPIES / _LAYERS) ** 0.5) // 64 * 64)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
        if dist.get_world_size() > 1:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model.to_empty(device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return cls(model, optimizer)

    def objects(self) -> dict[str, Any]:
        """For CheckpointManager."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint; loading into it loads into the state."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def locals(self) -> Iterator[tuple[torch.Tensor, int]]:
        """This rank's part of each tensor, and the number of its first element in the whole tensor."""
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"]):
                detached = tensor.detach()
                if isinstance(detached, DTensor):
                    rows, columns = detached.shape
                    chunk = -(-rows // dist.get_world_size())
                    yield detached.to_local(), min(rows, dist.get_rank() * chunk) * columns
                else:
                    yield detached, 0

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.locals())[0].device

    @property
    def local_bytes(self) -> int:
        """Of this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor, _ in self.locals())

    def fill(self, salt: int) -> None:
        """Put the numbers of ``salt`` everywhere."""
        for number, (tensor, start) in enumerate(self.locals()):
            tensor.copy_(_numbers(tensor, start, salt + number))

    def clear(self) -> None:
        """Put zeros everywhere."""
        for tensor, _ in self.locals():
            tensor.zero_()

    def wrong(self, salt: int) -> int:
        """How many of this rank's tensors differ in any bit from those of ``salt``."""
        return sum(
            not torch.equal(tensor.view(torch.int32), _numbers(tensor, start, salt + number).view(torch.int32))
            for number, (tensor, start) in enumerate(self.locals())
        )


def _numbers(like: torch.Tensor, start: int, salt: int) -> torch.Tensor:
    places = torch.arange(start, start + like.numel(), device=like.device, dtype=torch.int64)
    bits = (places.mul_(_MIX).add_(salt * 40503)).bitwise_and_(_POSITIVE_AND_FINITE)
    return bits.to(torch.int32).view(torch.float32).view(like.shape)
