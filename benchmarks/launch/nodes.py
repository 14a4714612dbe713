"""How does a launch grow from 1 to 8 agents on one machine? Call to return, one rank on each "node".

The nodes are processes of this machine with directories of their own, by the engine that the tests of the protocol use:
it starts agents and does nothing else, so that what is measured is ours. Each measurement is a launch from a process
that has launched before. All agents and ranks share this machine's processors: eight agents and eight ranks are sixteen
interpreters to start, and most of what is added with each is that, which real nodes do at the same time. So the same
number of interpreters, started at once and doing nothing, is measured too.

The ratio against a native way, `srun` with torchrun, is measured where this runs inside an allocation of two nodes or
more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from report import Table, in_turns

HERE = Path(__file__).parents[2]
ENGINES = str(HERE / "tests" / "engines")
NODES = (1, 2, 4, 8)
MEBIBYTES = 32
BODY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def bare() -> int:
    """What a rank does where only the launch is looked at."""
    return int(os.environ["RANK"])


def reduce() -> None:
    """What every rank does in the comparison with torchrun."""
    exec(BODY, {})


def seconds(call: Any) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def value() -> bytes:
    """A large result."""
    return b"x" * (MEBIBYTES << 20)


def output() -> None:
    """A large log."""
    for _ in range(MEBIBYTES << 10):
        print("x" * 1023)


def launch(nodes: int, function: Any = bare) -> None:
    from airdist import distributed

    settings = {"engine": "host_engine:HostEngine", "nodes": nodes, "num_accelerators": 1}
    assert len(distributed(**settings, tracking=False, logs="none")(function).distributed()) == nodes


def interpreters(nodes: int) -> None:
    """As many interpreters as a launch of so many nodes starts: agents, and then ranks."""
    for _ in range(2):
        for process in [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(nodes)]:
            process.wait()


def by_slurm(nodes: int) -> None:
    from airdist import distributed

    distributed(engine="slurm", nodes=nodes, num_accelerators=1, tracking=False, logs="none")(reduce).distributed()


def by_torchrun(nodes: int, script: str) -> None:
    hosts = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    first = subprocess.run(hosts, capture_output=True, text=True, check=True).stdout.split()[0]
    about = subprocess.run(["scontrol", "show", "node", first], capture_output=True, text=True, check=True).stdout
    host = re.search(r"NodeAddr=(\S+)", about).group(1)
    shape = ["--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:29471", f"--rdzv-id={time.monotonic_ns()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", *rendezvous]
    subprocess.run(["srun", *shape, *torchrun, script], check=True, capture_output=True, timeout=60)


def measure(rounds: int = 5) -> Table:
    """Launches of 1, 2, 4 and 8 nodes, and the interpreters that they start."""
    sys.path.append(ENGINES)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ENGINES, os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AIRDIST_RUN_DIR"] = f"{folder}/runs"
        sides = {f"{n} agents": partial(seconds, partial(launch, n)) for n in NODES}
        sides |= {f"{n} x 2 bare interpreters": partial(seconds, partial(interpreters, n)) for n in NODES}
        sides |= {
            "2 agents, 2 results of 32 MiB": partial(seconds, partial(launch, 2, value)),
            "2 agents, 2 logs of 32 MiB": partial(seconds, partial(launch, 2, output)),
        }
        ratios = []
        if shutil.which("srun") and int(os.environ.get("SLURM_JOB_NUM_NODES", "0")) > 1:
            script = Path(folder, "body.py")
            script.write_text(BODY)
            sides |= {
                "airdist by Slurm, 2 nodes": partial(seconds, partial(by_slurm, 2)),
                "srun torchrun, 2 nodes": partial(seconds, partial(by_torchrun, 2, str(script))),
            }
            ratios = [("srun torchrun, 2 nodes", "airdist by Slurm, 2 nodes", 1.0)]
        table = Table("launch and return, 1 to 8 agents on one machine", in_turns(rounds, sides), ratios)
    one, eight = table.median("1 agents"), table.median("8 agents")
    floor = table.median("8 x 2 bare interpreters") - table.median("1 x 2 bare interpreters")
    table.notes.append(
        f"each agent and its rank beyond the first: {(eight - one) / 7:.3f} s; "
        f"of two bare interpreters, {floor / 7:.3f} s; {os.cpu_count()} processors for all of them"
    )
    for what in ("results", "logs"):
        more = table.median(f"2 agents, 2 {what} of 32 MiB") - table.median("2 agents")
        table.notes.append(f"{what}: {2 * MEBIBYTES / more:.0f} MiB/s through node 0 to the caller's disk, at least")
    return table
