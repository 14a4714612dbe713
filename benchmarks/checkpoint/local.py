"""Save and load on a directory: ours, with every byte digested and checked, against PyTorch's writer and reader.

    python benchmarks/checkpoint/local.py [--directory /dev/shm] [--megabytes 512] [--tensors 64] [--rounds 7]

The default is memory-backed, so that the code is measured and not the disk.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Table, in_turns


def raw_write(state: dict[str, torch.Tensor], path: str) -> None:
    """The ceiling: the bytes of all tensors, one file, fsync."""
    with open(path, "wb", buffering=0) as file:
        file.writelines(tensor.numpy().data for tensor in state.values())
        os.fsync(file.fileno())


def raw_read(target: dict[str, torch.Tensor], path: str) -> None:
    """The ceiling: the bytes of all tensors into their memory."""
    with open(path, "rb", buffering=0) as file:
        for tensor in target.values():
            file.readinto(tensor.numpy().data)


def timed(function, *arguments, **options) -> float:
    start = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - start


def measure(rounds: int = 5, directory: str = "/dev/shm", megabytes: int = 512, tensors: int = 64) -> Table:
    """Every side of save and of load; a side of load reads what a save before it wrote."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    elements = megabytes * 1_000_000 // tensors // 4
    state = {f"t{n}": torch.randn(elements) for n in range(tensors)}
    target = {name: torch.zeros(elements) for name in state}
    root = tempfile.mkdtemp(prefix="airdata-bench-", dir=directory)

    def save(name: str, writer) -> float:
        path = os.path.join(root, name)
        shutil.rmtree(path, ignore_errors=True)
        return timed(dcp.save, state, storage_writer=writer(path), no_dist=True)

    def load(name: str, reader) -> float:
        return timed(dcp.load, target, storage_reader=reader(os.path.join(root, name)), no_dist=True)

    try:
        times = in_turns(
            rounds,
            {
                "save, PyTorch": lambda: save("stock", FileSystemWriter),
                "save, PyTorch, 4 threads": lambda: save("stock4", lambda p: FileSystemWriter(p, thread_count=4)),
                "save, airdata": lambda: save("ours", UCVolumeWriter),
                "write and fsync, no format": lambda: timed(raw_write, state, os.path.join(root, "raw")),
                "load, PyTorch": lambda: load("stock", FileSystemReader),
                "load, airdata": lambda: load("ours", UCVolumeReader),
                "load, airdata, verify off": lambda: load("ours", lambda p: UCVolumeReader(p, verify="off")),
                "read, no format": lambda: timed(raw_read, target, os.path.join(root, "raw")),
            },
        )
        assert all(torch.equal(state[name], target[name]) for name in state)
    finally:
        shutil.rmtree(root)
    table = Table(
        f"{megabytes} MB in {tensors} tensors, {directory}, torch {torch.__version__}",
        times,
        [("save, PyTorch", "save, airdata", 1.5), ("load, PyTorch", "load, airdata", 2.0)],
    )
    table.ratios.append(("write and fsync, no format", "save, airdata", 0.9))
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    print(measure(**vars(parser.parse_args())))
