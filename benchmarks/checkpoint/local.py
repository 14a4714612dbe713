"""Save and load on a directory: ours, with every byte digested and checked, against PyTorch's writer and reader.

    python benchmarks/checkpoint/local.py [--memory /dev/shm] [--disk /tmp] [--megabytes 512] [--rounds 7]

On a memory-backed directory, where the code is measured and not the disk, and on a disk, against a raw write with
fsync.
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


def measure(
    rounds: int = 5, memory: str = "/dev/shm", disk: str = "/tmp", megabytes: int = 512, tensors: int = 64
) -> Table:
    """Every side of save and of load; a side of load reads what a save before it wrote."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    elements = megabytes * 1_000_000 // tensors // 4
    state = {f"t{n}": torch.randn(elements) for n in range(tensors)}
    target = {name: torch.zeros(elements) for name in state}
    roots = {
        "memory": tempfile.mkdtemp(prefix="airdata-bench-", dir=memory),
        "disk": tempfile.mkdtemp(prefix="airdata-bench-", dir=disk),
    }

    def save(place: str, name: str, writer) -> float:
        path = os.path.join(roots[place], name)
        shutil.rmtree(path, ignore_errors=True)
        return timed(dcp.save, state, storage_writer=writer(path), no_dist=True)

    def load(name: str, reader) -> float:
        return timed(dcp.load, target, storage_reader=reader(os.path.join(roots["memory"], name)), no_dist=True)

    def write(place: str) -> float:
        path = os.path.join(roots[place], "raw")
        Path(path).unlink(missing_ok=True)
        return timed(raw_write, state, path)

    try:
        times = in_turns(
            rounds,
            {
                "memory: save, PyTorch": lambda: save("memory", "stock", FileSystemWriter),
                "memory: save, PyTorch, 4 threads": lambda: save(
                    "memory", "stock4", lambda p: FileSystemWriter(p, thread_count=4)
                ),
                "memory: save, airdata": lambda: save("memory", "ours", UCVolumeWriter),
                "memory: write, no format": lambda: write("memory"),
                "memory: load, PyTorch": lambda: load("stock", FileSystemReader),
                "memory: load, airdata": lambda: load("ours", UCVolumeReader),
                "memory: load, airdata, verify off": lambda: load("ours", lambda p: UCVolumeReader(p, verify="off")),
                "memory: read, no format": lambda: timed(raw_read, target, os.path.join(roots["memory"], "raw")),
                "disk: save, PyTorch": lambda: save("disk", "stock", FileSystemWriter),
                "disk: save, airdata": lambda: save("disk", "ours", UCVolumeWriter),
                "disk: write and fsync, no format": lambda: write("disk"),
            },
        )
        assert all(torch.equal(state[name], target[name]) for name in state)
    finally:
        for root in roots.values():
            shutil.rmtree(root)
    table = Table(
        f"{megabytes} MB in {tensors} tensors, {memory} and {disk}, torch {torch.__version__}",
        times,
        [
            ("memory: save, PyTorch", "memory: save, airdata", 1.5),
            ("memory: load, PyTorch", "memory: load, airdata", 2.0),
            ("disk: write and fsync, no format", "disk: save, airdata", 0.9),
        ],
    )
    table.notes.append("read from the page cache: what is compared is the code, not the disk")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--disk", default="/tmp")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    print(measure(**vars(parser.parse_args())))
