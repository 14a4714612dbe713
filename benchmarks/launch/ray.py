"""How long from the call to the first line after an all-reduce, on two Ray nodes? airdist against Ray Train.

One Ray of two nodes on this machine serves all measurements; each is a new process, as a script is. Ray Train's
clock starts when its process is connected to the cluster already; the clock of airdist includes that, since its launch
makes a connection of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import Table, in_turns

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False, "temp_dir": sys.argv[1]})
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
# Each rank leaves the time of its first line, on the clock that processes of a host share, in a file of its own.
BODY = """
import json, os, sys, time
folder, address = sys.argv[1:]

def first_line(rank):
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(repr(time.monotonic()))
"""
AIRDIST = """
from airdist import distributed

options = {"address": address}

@distributed(engine="ray", nodes=2, num_accelerators=1, engine_options=options, logs="none", tracking=False)
def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    first_line(dist.get_rank())
    return dist.get_rank()

launch = train.distributed
"""
RAY_TRAIN = """
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    first_line(dist.get_rank())
    return dist.get_rank()

ray.init(address, log_to_driver=False, logging_level="ERROR")
scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD")
launch = TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(storage_path=folder + "-storage")).fit
"""
CALL = """
start = time.monotonic()
launch()
print(json.dumps([start, time.monotonic()]))
"""


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a Ray of two nodes."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sessions:
        command = [sys.executable, "-c", CLUSTER, sessions]
        quiet = {"stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **quiet) as process:
            yield process.stdout.readline().strip()
            process.stdin.close()


class Side:
    """One launcher; a run gives two times, so the second is taken from the run of the first."""

    def __init__(self, script: Path, address: str) -> None:
        self.command = [sys.executable, str(script)]
        self.address = address
        self.returned = 0.0

    def first_line(self) -> float:
        """Seconds from the call to the later rank's first line."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*self.command, folder, self.address], capture_output=True, text=True, check=False, timeout=300
            )
            if done.returncode:
                raise RuntimeError(f"{self.command}: {done.stdout}\n{done.stderr}")
            start, end = json.loads(done.stdout.splitlines()[-1])
            self.returned = end - start
            return max(float(Path(folder, rank).read_text()) for rank in "01") - start


def measure(rounds: int = 5) -> Table:
    """Both launchers, to the first line and to the value."""
    with cluster() as address, tempfile.TemporaryDirectory() as scripts:
        sides = {}
        for name, text in {"airdist": AIRDIST, "TorchTrainer": RAY_TRAIN}.items():
            path = Path(scripts, f"{len(sides)}.py")
            path.write_text(BODY + text + CALL)
            side = Side(path, address)
            sides |= {name: side.first_line, f"{name}: return": lambda side=side: side.returned}
        started = time.monotonic()
        times = in_turns(rounds, sides)
        ratios = [("TorchTrainer", "airdist", 1.5), ("TorchTrainer: return", "airdist: return", 1.5)]
        table = Table("from the call to the first line on two Ray nodes", times, ratios)
        table.notes.append(f"{rounds} rounds after one to warm up, {time.monotonic() - started:.0f} s in all")
        return table
