"""How do planning and `.metadata` of a checkpoint grow with the ranks that share it?

What rank 0 does while all others wait: the global plan over the plans of all ranks, and writing down the metadata that
comes of it. The plans are those of 30 tensors of which every rank holds a slice, as FSDP makes them; nothing is
written. What grows is the number of slices, tensors times ranks: a model with ten times the tensors and as many ranks
stands where ten times the ranks would.
"""

from __future__ import annotations

import pickle
import time

import torch
from report import Table
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

TENSORS = 30
RANKS = (8, 64, 256, 1024)


def plans_of(ranks: int) -> list[SavePlan]:
    """What every rank hands in."""
    properties = TensorProperties(dtype=torch.bfloat16)
    size = torch.Size([ranks * 16, 64])
    return [
        SavePlan(
            [
                WriteItem(
                    MetadataIndex(f"model.layers.{number}.weight", torch.Size([rank * 16, 0]), None),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size([rank * 16, 0]), torch.Size([16, 64])), properties, size
                    ),
                )
                for number in range(TENSORS)
            ],
            planner_data={},
        )
        for rank in range(ranks)
    ]


def measure(rounds: int = 3) -> Table:
    """Planning and writing down, up to 1024 ranks."""
    times: dict[str, list[float]] = {}
    notes = []
    for ranks in RANKS:
        plans = plans_of(ranks)
        for _ in range(rounds):
            planner = DefaultSavePlanner()
            planner.set_up_planner({}, is_coordinator=True)
            start = time.perf_counter()
            _, metadata = planner.create_global_plan(plans)
            planned = time.perf_counter()
            size = len(pickle.dumps(metadata))
            written = time.perf_counter()
            times.setdefault(f"{ranks} ranks: global plan", []).append(planned - start)
            times.setdefault(f"{ranks} ranks: pickling", []).append(written - planned)
        sent = sum(len(pickle.dumps(plan)) for plan in plans)
        notes.append(
            f"{ranks} ranks: plans of {sent / 1e6:.1f} MB, metadata of {size / 1e6:.1f} MB before storage's part"
        )
    return Table(f"a checkpoint of {TENSORS} tensors, each in as many slices as ranks", times, notes=notes)
