"""How long from the call to the first line after an all-reduce, in two Spark tasks? airdist against TorchDistributor.

One session of two executors on this machine, the one of the tests, serves all measurements, and both launchers are
called from this process, as a notebook does; a round to warm up has started the executors' Python before.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from report import Table, in_turns

ENGINES = str(Path(__file__).parents[2] / "tests" / "engines")


def body(folder: str) -> int:
    """Leave the time of the first line, on the clock that processes of a host share."""
    import os
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(repr(time.monotonic()))
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


class Side:
    """One launcher; a run gives two times, so the second is taken from the run of the first."""

    def __init__(self, call) -> None:
        self.call = call
        self.returned = 0.0

    def first_line(self) -> float:
        """Seconds from the call to the later rank's first line."""
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            self.call(folder)
            self.returned = time.monotonic() - start
            return max(float(Path(folder, rank).read_text()) for rank in "01") - start


def by_airdist(folder: str) -> None:
    from airdist import distributed

    settings = {"engine": "spark", "nodes": 2, "num_accelerators": 1, "tracking": False, "logs": "none"}
    assert distributed(**settings)(body).distributed(folder) == [0, 1]


def by_torch_distributor(folder: str) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    assert TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(body, folder) == 0


def measure(rounds: int = 5) -> Table:
    """Both launchers, to the first line and to the value."""
    sys.path.append(ENGINES)
    import spark_cluster

    if lacking := spark_cluster.missing():
        sys.exit(f"launch/spark {lacking}")
    cluster = spark_cluster.SparkCluster()
    try:
        with tempfile.TemporaryDirectory() as runs:
            os.environ["AIRDIST_RUN_DIR"] = runs
            sides = {}
            for name, call in {"airdist": by_airdist, "TorchDistributor": by_torch_distributor}.items():
                side = Side(call)
                sides |= {name: side.first_line, f"{name}: return": lambda side=side: side.returned}
            times = in_turns(rounds, sides)
    finally:
        cluster.stop()
    ratios = [("TorchDistributor", "airdist", 1.0), ("TorchDistributor: return", "airdist: return", 1.0)]
    return Table("from the call to the first line in two Spark tasks", times, ratios)
