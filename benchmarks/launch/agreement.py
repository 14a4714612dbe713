"""How long does rank 0 take to compare what all ranks say of their data, when all have said it?

The store is a real one on the loopback interface, and one process has said what every rank would; the network of a
cluster adds its round trip to each of the reads, which rank 0 makes one after the other.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist
from report import Table, in_turns

from airdata.agreement import agree

RANKS = (8, 1000, 10_000)
FACTS = {"manifest": "f" * 32, "files": 1_000_000, "seed": 0, "epoch": 0, "batch size": 32, "workers": 6}


def measure(rounds: int = 5) -> Table:
    """Comparisons of 8 to 10,000 ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    turns = iter(range(1_000_000))

    def compare(ranks: int) -> float:
        prefix = f"benchmark/{next(turns)}/"
        for rank in range(1, ranks):
            store.set(f"{prefix}0/{rank}", json.dumps(FACTS))
        start = time.perf_counter()
        agree(store, FACTS, prefix=prefix, turn=0, rank=0, world_size=ranks, timeout=60)
        return time.perf_counter() - start

    sides = {f"{ranks} ranks": lambda ranks=ranks: compare(ranks) for ranks in RANKS}
    return Table("rank 0 compares what all ranks say of their data", in_turns(rounds, sides))
