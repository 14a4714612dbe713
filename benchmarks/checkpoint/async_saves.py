"""Ten asynchronous saves in a row: how long each holds training up, and what it takes of the host's memory and disk.

    python benchmarks/checkpoint/async_saves.py [--megabytes 256] [--tensors 32] [--saves 10]

Against the bare copy of the state, and against ``dcp.async_save`` with PyTorch's own stager and writer. The state lies
in pageable CPU memory here; benchmarks/gpu measures page-locked copies from a GPU. Each side runs in a process of its
own, so that its peak of memory is its own. Files go to a memory-backed directory and, where the bytes staged on their
way to a store are measured, to an fsspec filesystem that keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Table

SIDE = r"""
import json, logging, os, sys, tempfile, threading, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import torch, torch.distributed.checkpoint as dcp
torch.set_num_threads(1)  # so that the work of the calling thread is all of it
from torch.distributed.checkpoint import FileSystemWriter
from airdata.checkpoint import CheckpointManager, UCVolumeWriter
side, megabytes, tensors, saves, root = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
elements = megabytes * 1_000_000 // tensors // 4
state = {f"t{n}": torch.randn(elements) for n in range(tensors)}

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

def train():
    for tensor in state.values():
        tensor.add_(1)

def save_with_manager(step):
    manager.save(step, state)

def save_with_torch(step):
    global pending
    if pending is not None:
        pending.result()
    pending = dcp.async_save(state, storage_writer=FileSystemWriter(f"{root}/{step}"), no_dist=True)

def copy(step):
    for name, tensor in state.items():
        buffer[name].copy_(tensor)

pending, stalls, work, staged = None, [], [], 0
if side == "store":
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem
    sizes = {}
    class Nowhere(MemoryFileSystem):
        protocol = "nowhere"
        store, pseudo_dirs = {}, [""]
        def put_file(self, source, target, **options):
            sizes[self._strip_protocol(target)] = os.path.getsize(source)
            self.pipe_file(target, b"")
        def info(self, path, **options):
            found = super().info(path, **options)
            return {**found, "size": sizes.get(self._strip_protocol(path), found["size"])}
        def find(self, path, **options):
            found = super().find(path, **options)
            return {name: self.info(name) for name in found} if options.get("detail") else found
    fsspec.register_implementation("nowhere", Nowhere, clobber=True)
    stop, folder = threading.Event(), f"{root}/staging"
    def watch():
        global staged
        while not stop.wait(0.002):
            sizes_now = 0
            for entry in os.scandir(folder) if os.path.isdir(folder) else ():
                try: sizes_now += entry.stat().st_size
                except OSError: pass
            staged = max(staged, sizes_now)
    watcher = threading.Thread(target=watch); watcher.start()
    options = {"staging_dir": folder, "file_bytes": 40 << 20, "staging_bytes": 80 << 20, "memory_bytes": 1}
    manager = CheckpointManager("nowhere://a/steps", prove_first=False, keep_last=None, writer_options=options)
    run = save_with_manager
elif side == "manager":
    manager = CheckpointManager(root)
    run = save_with_manager
elif side == "torch":
    run = save_with_torch
else:
    buffer = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    run = copy
before = resident("VmRSS")
for step in range(saves):
    start, worked = time.perf_counter(), time.thread_time()
    run(step)
    stalls.append(time.perf_counter() - start)
    work.append(time.thread_time() - worked)
    train()
    if side in ("manager", "store"): manager.wait()
    if pending is not None: pending.result()
if side == "store":
    stop.set(); watcher.join()
typical = sorted(work[1:])[len(work) // 2 - 1]
print(json.dumps({"stalls": stalls, "work": typical, "peak": resident("VmHWM") - before, "staged": staged}))
os._exit(0)
"""
NAMES = {
    "copy": "bare copy into memory that is there",
    "manager": "CheckpointManager.save",
    "torch": "dcp.async_save, PyTorch's stager",
    "store": "CheckpointManager.save to a store",
}


def measure(rounds: int = 10, megabytes: int = 256, tensors: int = 32) -> Table:
    """The stall of each of ``rounds`` saves; the first and the memory as notes."""
    times, notes = {}, []
    for side, name in NAMES.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            command = [sys.executable, "-c", SIDE, side, str(megabytes), str(tensors), str(max(2, rounds)), root]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        times[name] = answer["stalls"][1:]
        note = (
            f"{name}: first {answer['stalls'][0]:.3f} s, then {answer['work']:.4f} s of CPU time in its thread; "
            f"{answer['peak'] / megabytes / 1e6:.2f} of the state"
        )
        staged = f", {answer['staged'] / 1e6:.0f} MB staged at most (limit 84 MB)" if side == "store" else ""
        notes.append(f"{note} in memory at the peak, beside the state{staged}")
    table = Table(f"stall of asynchronous saves, {megabytes} MB on the CPU, second save on", times, notes=notes)
    table.ratios += [(NAMES["torch"], NAMES["manager"], 1.0), (NAMES["copy"], NAMES["manager"], 0.77)]
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--saves", dest="rounds", type=int, default=10)
    print(measure(**vars(parser.parse_args())))
