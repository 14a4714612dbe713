"""Save and load on a local directory: ours, with every byte digested and checked, against the stock writer and reader.

    python benchmarks/checkpoint_local.py [--directory /dev/shm] [--megabytes 512] [--tensors 64] [--rounds 7]

Both sides alternate within a round; the ratio of the medians is what counts.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    elements = arguments.megabytes * 1_000_000 // arguments.tensors // 4
    state = {f"t{n}": torch.randn(elements) for n in range(arguments.tensors)}
    target = {name: torch.zeros(elements) for name in state}
    # Threads are chosen as each side does by default, and once the stock writer with as many as ours.
    writers = {
        "stock": FileSystemWriter,
        "stock, 4 threads": lambda path: FileSystemWriter(path, thread_count=4),
        "ours": UCVolumeWriter,
    }
    readers = {
        "stock": FileSystemReader,
        "ours": UCVolumeReader,
        "ours, verify=off": lambda path: UCVolumeReader(path, verify="off"),
    }
    saves: dict[str, list[float]] = {name: [] for name in [*writers, "raw write and fsync"]}
    loads: dict[str, list[float]] = {name: [] for name in readers}
    root = tempfile.mkdtemp(prefix="airdata-bench-", dir=arguments.directory)
    try:
        for round_number in range(arguments.rounds):
            paths = {}
            for name, writer in writers.items():
                paths[name] = os.path.join(root, f"{name}-{round_number}".replace(" ", ""))
                start = time.perf_counter()
                dcp.save(state, storage_writer=writer(paths[name]))
                saves[name].append(time.perf_counter() - start)
            saves["raw write and fsync"].append(raw_write(state, os.path.join(root, "raw")))
            for name, reader in readers.items():
                path = paths["stock" if name == "stock" else "ours"]
                start = time.perf_counter()
                dcp.load(target, storage_reader=reader(path))
                loads[name].append(time.perf_counter() - start)
            assert all(torch.equal(state[key], target[key]) for key in state)
            for path in paths.values():
                shutil.rmtree(path)
    finally:
        shutil.rmtree(root)
    print(f"{arguments.megabytes} MB in {arguments.tensors} tensors, {arguments.directory}, torch {torch.__version__}")
    for title, times in {"save": saves, "load": loads}.items():
        base = statistics.median(times["stock"])
        for name, values in times.items():
            median = statistics.median(values)
            speed = arguments.megabytes / 1000 / median
            print(f"  {title} {name:<22} {median:6.3f} s  {speed:5.2f} GB/s  {base / median:5.2f}x of stock")


def raw_write(state: dict[str, torch.Tensor], path: str) -> float:
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        file.writelines(tensor.numpy().data for tensor in state.values())
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    os.unlink(path)
    return seconds


if __name__ == "__main__":
    main()
