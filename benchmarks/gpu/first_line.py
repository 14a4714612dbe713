"""From the call to the first line after an all-reduce: torchrun, ours and no launcher, on one GPU, two, four and so on.

Each measurement is a new process, as a script or the first launch of a notebook is. What it runs is a function of the
script itself, with a model class beside it, as in a notebook: both travel by value.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu.machine import Setting
from gpu.results import Result

ROUNDS = 3
BODY = """
import os, sys, time

def body(folder):
    import torch, torch.distributed as dist
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    now = time.monotonic()
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(repr(now))
    dist.destroy_process_group()
"""
# Ranks outlive a torchrun that is killed, as it is when the time is over; PR_SET_PDEATHSIG ends them too.
ENDS_WITH_PARENT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)"
TORCHRUN = f"{BODY}\n{ENDS_WITH_PARENT}\nbody(sys.argv[1])\n"
# What no launcher can be quicker than: the ranks alone, with what they need in their environment.
BY_HAND = f"""{BODY}
import socket, subprocess

if "RANK" in os.environ:
    {ENDS_WITH_PARENT}
    body(sys.argv[1])
else:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]), WORLD_SIZE=sys.argv[2])
    with open(os.path.join(sys.argv[1], "start"), "w") as file:
        file.write(repr(time.monotonic()))
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={{**os.environ, **meeting, "RANK": n, "LOCAL_RANK": n}})
        for n in map(str, range(int(sys.argv[2])))
    ]
    sys.exit(any([rank.wait() for rank in ranks]))
"""
OURS = f"""{BODY}
from airdist import distributed

if __name__ == "__main__":
    launch = distributed(num_accelerators=int(sys.argv[2]), logs="none", tracking=False)(body).distributed
    with open(os.path.join(sys.argv[1], "start"), "w") as file:
        file.write(repr(time.monotonic()))
    launch(sys.argv[1])
"""
# A model and a training function in the caller's own __main__, launched as it stands: by DDP, on every accelerator.
MLP = """
import os, sys
import torch
from airdist import distributed

class MLP(torch.nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    def forward(self, x):
        return self.layers(x)

def make_data(seed):
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(seed))
    return x, x.square().sum(1, keepdim=True)

@distributed(num_accelerators=int(sys.argv[1]), tracking=False)
def train(steps):
    import torch.distributed as dist
    rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    model = torch.nn.parallel.DistributedDataParallel(MLP().to(device), device_ids=[rank] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = (part.to(device) for part in make_data(rank))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses[0], losses[-1]

if __name__ == "__main__":
    results = train.distributed(100)
    assert len(results) == int(sys.argv[1]) and all(last < first for first, last in results), results
"""


def first_lines(setting: Setting) -> Result:
    """The example, then both sides in turns for each number of ranks."""
    result = Result(
        "From the call to the first line after an all-reduce",
        ["ranks", "torchrun, s", "airdist, s", "no launcher, s", "torchrun over airdist", "no launcher over airdist"],
    )
    texts = {"torchrun": TORCHRUN, "airdist": OURS, "no launcher": BY_HAND, "mlp": MLP}
    scripts = {name: setting.path(f"run_{name.replace(' ', '_')}.py") for name in texts}
    for name, text in texts.items():
        Path(scripts[name]).write_text(text, encoding="utf-8")
    mlp = run([sys.executable, scripts["mlp"], str(setting.ranks)], setting)
    result.checks.append((f"a script's own model class and functions train with DDP on {setting.ranks} ranks", mlp))
    counts = {min(2**n, setting.ranks) for n in range(setting.ranks.bit_length() + 1)}
    for count in sorted(counts, reverse=True):  # all of them first, since time may run out
        if result.rows and time.monotonic() > setting.deadline:
            result.notes.append(f"no time left for fewer than {result.rows[-1][0]} ranks")
            break
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", scripts["torchrun"]]
        sides = {name: [sys.executable, scripts[name]] for name in ("airdist", "no launcher")}
        sides["torchrun"] = [sys.executable, *torchrun]
        times: dict[str, list[float]] = {name: [] for name in sides}
        for done in range(ROUNDS):
            if done and time.monotonic() > setting.deadline:
                break
            for name, command in sides.items():
                times[name].append(once(command, count, setting))
        medians = {name: statistics.median(values) for name, values in times.items()}
        torchrun, ours, alone = (medians[name] for name in ("torchrun", "airdist", "no launcher"))
        result.rows.append([count, torchrun, ours, alone, torchrun / ours, alone / ours])
        result.bars |= {f"{name}, {count} ranks": median for name, median in medians.items()}
        if count == 2:
            result.check_at_least("torchrun over airdist, 2 ranks", torchrun / ours, 2.0)
    result.notes += [
        f"medians of up to {ROUNDS}, in turns",
        "no launcher: the ranks alone, started by hand; they import torch, take their GPU and meet",
    ]
    return result


def once(command: list[str], ranks: int, setting: Setting) -> float:
    """Seconds to the last rank's first line."""
    with tempfile.TemporaryDirectory(dir=setting.work) as folder:
        start = time.monotonic()
        if not run([*command, folder, str(ranks)], setting):
            raise RuntimeError(f"{command} failed; see above")
        times = {path.name: float(path.read_text()) for path in Path(folder).iterdir()}
        return max(times[str(rank)] for rank in range(ranks)) - times.get("start", start)


def run(command: list[str], setting: Setting) -> bool:
    """Run a script; its output goes where this process's goes."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if setting.device == "cpu" else {}
    return subprocess.run(command, check=False, timeout=120, env={**os.environ, **hidden}).returncode == 0
