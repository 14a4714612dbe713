"""Save and load on an S3 API server of this machine: ours against ``FsspecWriter`` and ``FsspecReader``, with requests.

The server (moto, in a process of its own) is slow and shares the cores, so the ratios count, and the raw transfer of
the same bytes is the ceiling. Both sides go through s3fs, where requests and bytes are counted in runs of their own.

    python benchmarks/checkpoint/s3.py [--megabytes 128] [--tensors 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Table, in_turns

SIDES = ("PyTorch", "airdata")


class Store:
    """A bucket, and both sides' ways to it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.options = {"key": "test", "secret": "test", "endpoint_url": endpoint}

    def save(self, side: str, state: dict, *, alone: bool = True) -> float:
        url = f"s3://bench/{side}"
        if side == "airdata":
            writer = UCVolumeWriter(url, storage_options=self.options)
        else:
            writer = FsspecWriter(url, **self.options)
        return timed(dcp.save, state, storage_writer=writer, no_dist=alone)

    def load(self, side: str, target: dict) -> float:
        url = f"s3://bench/{side}"
        if side == "airdata":
            reader = UCVolumeReader(url, storage_options=self.options)
        else:
            reader = FsspecReader(url, **self.options)
        return timed(dcp.load, target, storage_reader=reader, no_dist=True)


def timed(function, *arguments, **options) -> float:
    start = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - start


@contextlib.contextmanager
def server():
    """An S3 API server; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("the S3 server did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def counted():
    """Count the requests that s3fs makes, by verb, and the bytes that ``get_object`` brings."""
    seen: Counter[str] = Counter()
    call = S3FileSystem._call_s3

    async def counting(self, method, *arguments, **options):
        answer = await call(self, method, *arguments, **options)
        seen[method if isinstance(method, str) else method.__name__] += 1
        if method == "get_object":
            seen["bytes"] += answer["ContentLength"]
        return answer

    blocking = S3FileSystem.call_s3  # made from the other one when the class was, and used by open files
    S3FileSystem._call_s3, S3FileSystem.call_s3 = counting, sync_wrapper(counting)
    try:
        yield seen
    finally:
        S3FileSystem._call_s3, S3FileSystem.call_s3 = call, blocking


def requests(seen: Counter[str]) -> str:
    verbs = {verb: number for verb, number in seen.items() if verb != "bytes"}
    listed = ", ".join(f"{number} {verb}" for verb, number in sorted(verbs.items(), key=lambda item: -item[1]))
    return f"{sum(verbs.values())} requests ({listed})"


def amplification(store: Store, side: str, targets: list[dict]) -> str:
    """Bytes read over bytes wanted, of loads into each of ``targets``; the requests of all of them."""
    with counted() as seen:
        for target in targets:
            store.load(side, target)
    tensors = [t.to_local() if isinstance(t, DTensor) else t for target in targets for t in target.values()]
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return f"{seen['bytes'] / need:.2f} of the bytes, {requests(seen)}"


def shards_of(rank: int, world: int, state: dict, dim: int) -> dict:
    """What one rank of several would load into, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    return {
        name: DTensor.from_local(torch.zeros_like(tensor.chunk(world, dim)[rank]).contiguous(), mesh, [Shard(dim)])
        for name, tensor in state.items()
    }


def save_as_rank(rank: int, world: int, rendezvous: str, endpoint: str, state: dict) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    sharded = {
        name: DTensor.from_local(tensor.chunk(world)[rank].contiguous(), mesh, [Shard(0)])
        for name, tensor in state.items()
    }
    for side in SIDES:
        Store(endpoint).save(side, sharded, alone=False)
    dist.barrier()
    os._exit(0)


def count(store: Store, state: dict) -> list[str]:
    """Requests of saves and loads, and read amplification, in words."""
    notes = []
    for side in SIDES:
        with counted() as seen:
            store.save(side, state)
        notes.append(f"{side}, save: {requests(seen)}")
        for what, names in {
            "whole": list(state),
            "whole, another order": list(state)[::-1],
            "every 8th tensor": list(state)[::8],
        }.items():
            target = {name: torch.zeros_like(state[name]) for name in names}
            notes.append(f"{side}, load, {what}: {amplification(store, side, [target])}")
        for what, dim in {"1 rank to 4, rows": 0, "1 rank to 4, columns": 1}.items():
            answers = []
            for rank in range(4):
                answers.append(amplification(store, side, [shards_of(rank, 4, state, dim)]))
                dist.destroy_process_group()
            notes.append(f"{side}, load, {what}, rank 0: {answers[0]}")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = [(rank, 4, f"{folder}/meet", store.endpoint, state) for rank in range(4)]
        ranks = [context.Process(target=save_as_rank, args=given) for given in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=300)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with {process.exitcode}")
    for side in SIDES:
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        notes.append(f"{side}, load, 4 ranks to 1: {amplification(store, side, [target])}")
        assert all(torch.equal(state[name], target[name]) for name in state)
    return notes


def measure(rounds: int = 5, megabytes: int = 128, tensors: int = 64) -> Table:
    """Times of save and load on both sides and of the raw transfer; requests and read amplification as notes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = megabytes * 1_000_000 // tensors // 4 // 512
    state = {f"t{n}": torch.randn(rows, 512) for n in range(tensors)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with server() as endpoint, tempfile.NamedTemporaryFile() as raw:
        store = Store(endpoint)
        filesystem = S3FileSystem(**store.options)
        filesystem.mkdir("bench")
        for tensor in state.values():
            raw.write(tensor.numpy().data)
        raw.flush()
        times = in_turns(
            rounds,
            {
                "save, PyTorch": lambda: store.save("PyTorch", state),
                "save, airdata": lambda: store.save("airdata", state),
                "put of the same bytes": lambda: timed(filesystem.put_file, raw.name, "bench/raw"),
                "load, PyTorch": lambda: store.load("PyTorch", target),
                "load, airdata": lambda: store.load("airdata", target),
                "get of the same bytes": lambda: timed(filesystem.cat_file, "bench/raw"),
            },
        )
        assert all(torch.equal(state[name], target[name]) for name in state)
        notes = count(store, state)
    table = Table(f"{megabytes} MB in {tensors} tensors on S3 (moto), torch {torch.__version__}", times, notes=notes)
    table.ratios += [("save, PyTorch", "save, airdata", 3.0), ("put of the same bytes", "save, airdata", 0.9)]
    table.ratios += [("load, PyTorch", "load, airdata", 3.0), ("get of the same bytes", "load, airdata", 0.9)]
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    print(measure(**vars(parser.parse_args())))
