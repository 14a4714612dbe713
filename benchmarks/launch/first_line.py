"""How long from the call to the first line after an all-reduce, on two ranks? airdist against other launchers.

Every measurement is a new process that calls the launcher once, as a script or the first launch of a notebook does, and
has imported what that launcher needs before the clock starts. torchrun is a command, so its clock starts before its own
interpreter. Launchers that are not installed (torchrunx, Accelerate) are left out. `elastic_launch` and Accelerate are
measured as a notebook must use them, with forked ranks, which inherit an imported torch (and fail if the notebook has
used CUDA); the comparison with torchrun is the one between equals. All packages are compiled, as an installation leaves
them: with PYTHONDONTWRITEBYTECODE a source tree that was edited would be compiled by each process anew.
"""

from __future__ import annotations

import compileall
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Table, in_turns

# Each rank leaves the time of its first line, on the clock that processes of a host share, in a file of its own.
BODY = """
import os, sys, time

def body(folder):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 2
    leave(folder)
    dist.destroy_process_group()  # without this a rank of torchrun aborts now and then

def hello(folder):
    leave(folder)

def leave(folder):
    now = time.monotonic()
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(repr(now))
"""
AIRDIST = """
from airdist import distributed
launch = distributed(num_accelerators=2, logs="none", tracking=False)({function}).distributed
"""
LAUNCHERS = {
    "airdist": AIRDIST.format(function="body"),
    "torchrunx": """
import torchrunx
launch = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=2, backend=None).run
launch = lambda folder, run=launch: run(body, folder)
""",
    "elastic_launch, fork": """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork", max_restarts=0)
launch = elastic_launch(config, body)
""",
    "accelerate notebook_launcher, fork": """
from accelerate import notebook_launcher
import socket
with socket.create_server(("", 0)) as probe:  # a port of its own choice (0) is not one that its ranks find
    port = str(probe.getsockname()[1])
launch = lambda folder: notebook_launcher(body, (folder,), num_processes=2, use_port=port)
""",
    "airdist, no torch": AIRDIST.format(function="hello"),
}
NEEDS = {"torchrunx": "torchrunx", "accelerate notebook_launcher, fork": "accelerate"}
CALL = """
if __name__ == "__main__":
    with open(os.path.join(sys.argv[1], "start"), "w") as file:
        file.write(repr(time.monotonic()))
    launch(sys.argv[1])
    with open(os.path.join(sys.argv[1], "end"), "w") as file:
        file.write(repr(time.monotonic()))
"""


def once(command: list[str], *, returns: bool = False) -> float:
    """Seconds from the call to the later rank's first line, or to the return of the call."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        done = subprocess.run([*command, folder], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stdout}\n{done.stderr}")
        times = {path.name: float(path.read_text()) for path in Path(folder).iterdir()}
        end = times.get("end", time.monotonic()) if returns else max(times["0"], times["1"])
        return end - times.get("start", start)


def bare_interpreter() -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - start


def measure(rounds: int = 5) -> Table:
    """All launchers, and the floor under the launch of a function without torch."""
    airdist = importlib.util.find_spec("airdist")
    assert airdist is not None
    for folder in airdist.submodule_search_locations or ():
        compileall.compile_dir(folder, quiet=1)
    with tempfile.TemporaryDirectory() as scripts:
        torchrun = Path(scripts, "torchrun.py")
        torchrun.write_text(BODY + "body(sys.argv[1])\n")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(torchrun)]
        commands = {"torchrun": command}
        for name, text in LAUNCHERS.items():
            if importlib.util.find_spec(NEEDS.get(name, "airdist")):
                path = Path(scripts, f"{len(commands)}.py")
                path.write_text(BODY + text + CALL)
                commands[name] = [sys.executable, str(path)]
        sides = {name: lambda command=command: once(command) for name, command in commands.items()}
        sides |= {
            f"{name}: return": lambda command=commands[name]: once(command, returns=True)
            for name in ("torchrun", "airdist", "airdist, no torch")
        }
        times = in_turns(rounds, {**sides, "bare interpreter": bare_interpreter})
    ratios = [(name, "airdist", 2.0) for name in ("torchrun", "torchrunx") if name in times]
    table = Table("from the call to the first line, 2 ranks", times, ratios)
    over = table.median("airdist, no torch") - table.median("bare interpreter")
    table.notes.append(f"without torch: {over:.3f} s over a bare interpreter (target: at most 0.15)")
    return table
