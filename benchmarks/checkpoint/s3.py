"""Save and load on an S3 API server of this machine: ours against PyTorch's and s3torchconnector's, with requests.

The server (moto, in a process of its own) is slow and shares the cores, so the ratios count, and the raw transfer of
the same bytes is the ceiling. It answers every request after ``latency`` seconds, as a store far away does, and counts
what it was asked for and what it sent, whoever asked.

    python benchmarks/checkpoint/s3.py [--megabytes 128] [--tensors 64] [--rounds 5] [--latency 0.02]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from s3fs import S3FileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Table, in_turns

SERVER = """
import json, re, sys, threading, time
from collections import Counter
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple
port, latency = int(sys.argv[1]), float(sys.argv[2])
inner, seen, lock = DomainDispatcherApplication(create_backend_app), Counter(), threading.Lock()

class Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as they do with a real store
    disable_nagle_algorithm = True
    def log(self, *_): pass

def app(environ, start_response):
    path, query, verb = environ["PATH_INFO"], environ.get("QUERY_STRING", ""), environ["REQUEST_METHOD"]
    if path == "/counts":
        with lock:
            body = json.dumps(seen).encode()
            seen.clear()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
    time.sleep(latency)
    is_object = path.strip("/").count("/") > 0
    name = verb if is_object else "LIST" if verb == "GET" else f"{verb} bucket"
    if "partNumber" in query: name = "PUT part"
    elif "upload" in query: name = "multipart"
    elif "HTTP_X_AMZ_COPY_SOURCE" in environ: name = "COPY"
    def counting(status, headers, *rest):
        with lock:
            seen[name] += 1
            if name == "GET" and path.endswith(".distcp"):
                seen["bytes"] += int(dict(headers).get("Content-Length", 0))
        return start_response(status, headers, *rest)
    return inner(environ, counting)

run_simple("127.0.0.1", port, app, threaded=True, request_handler=Handler)
"""

SIDES = ["PyTorch", "airdata"]
if importlib.util.find_spec("s3torchconnector"):
    SIDES.insert(1, "s3torchconnector")
KINDS = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}


class Store:
    """A bucket, and each side's way to it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.options = {"key": "test", "secret": "test", "endpoint_url": endpoint}
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}

    def save(self, side: str, state: dict, *, place: str = "one", alone: bool = True) -> float:
        url = f"s3://bench/{place}/{side}"
        if side == "airdata":
            writer = UCVolumeWriter(url, storage_options=self.options)
        elif side == "PyTorch":
            writer = FsspecWriter(url, **self.options)
        else:
            from s3torchconnector.dcp import S3StorageWriter

            writer = self._connect(S3StorageWriter("us-east-1", url, thread_count=4, **self._connector()))
        return timed(dcp.save, state, storage_writer=writer, no_dist=alone)

    def load(self, side: str, target: dict, *, place: str = "one", alone: bool = True) -> float:
        url = f"s3://bench/{place}/{side}"
        if side == "airdata":
            reader = UCVolumeReader(url, storage_options=self.options)
        elif side == "PyTorch":
            reader = FsspecReader(url, **self.options)
        else:
            from s3torchconnector.dcp import S3StorageReader

            reader = self._connect(S3StorageReader("us-east-1", url, **self._connector()))
        return timed(dcp.load, target, storage_reader=reader, no_dist=alone)

    def _connector(self) -> dict:
        from s3torchconnector import S3ClientConfig

        return {"s3client_config": S3ClientConfig(force_path_style=True)}

    def _connect(self, storage):
        storage.fs._client._endpoint = self.endpoint  # its DCP classes take a region and no endpoint
        return storage

    def counts(self) -> dict[str, int]:
        """What the server saw since the last call."""
        with urlopen(f"{self.endpoint}/counts") as answer:
            return json.load(answer)


def timed(function, *arguments, **options) -> float:
    start = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - start


@contextlib.contextmanager
def server(latency: float):
    """An S3 API server; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port), str(latency)]
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


def make_state(megabytes: int, tensors: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = megabytes * 1_000_000 // tensors // 4 // 512
    return {f"t{n}": torch.randn(rows, 512, generator=generator) for n in range(tensors)}


def in_words(seen: dict[str, int]) -> str:
    verbs = {verb: number for verb, number in seen.items() if verb != "bytes"}
    listed = ", ".join(f"{number} {verb}" for verb, number in sorted(verbs.items(), key=lambda item: -item[1]))
    return f"{sum(verbs.values())} requests ({listed})"


def amplification(seen: dict[str, int], need: int) -> str:
    return f"{seen.get('bytes', 0) / need:.2f} of the bytes, {in_words(seen)}"


def count_alone(store: Store, state: dict) -> list[str]:
    """Requests of saves and loads by one process, and read amplification, in words."""
    notes = []
    for side in SIDES:
        store.counts()
        store.save(side, state)
        notes.append(f"{side}, save: {in_words(store.counts())}")
        for what, names in {
            "whole": list(state),
            "whole, another order": list(state)[::-1],
            "every 8th tensor": list(state)[::8],
        }.items():
            target = {name: torch.zeros_like(state[name]) for name in names}
            store.load(side, target)
            need = sum(tensor.numel() * 4 for tensor in target.values())
            notes.append(f"{side}, load, {what}: {amplification(store.counts(), need)}")
    return notes


def as_rank(rank: int, world: int, folder: str, endpoint: str, size: tuple[int, int]) -> None:
    """One of the ranks of one node that save, and load what one process saved; rank 0 writes down what they cost."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    store, state, notes = Store(endpoint), make_state(*size), []
    for side in SIDES:
        for kind, placement in KINDS.items():
            target = {
                name: distribute_tensor(torch.zeros_like(tensor), mesh, [placement]) for name, tensor in state.items()
            }
            dist.barrier()
            store.counts()
            dist.barrier()
            seconds = store.load(side, target, alone=False)
            dist.barrier()
            if rank == 0:
                wanted = sum(tensor.to_local().numel() * 4 for tensor in target.values()) * world
                words = amplification(store.counts(), wanted)
                notes.append(f"{side}, load, 1 rank to {world} of a node, {kind}: {words}, {seconds:.2f} s")
            assert all(torch.equal(tensor.full_tensor(), state[name]) for name, tensor in target.items())
        sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
        store.save(side, sharded, place="four", alone=False)
    if rank == 0:
        Path(folder, "notes").write_text("\n".join(notes))
    dist.barrier()
    os._exit(0)


def count_ranks(store: Store, state: dict, size: tuple[int, int]) -> list[str]:
    """The same for four ranks of one node, of which each wants a part."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = [(rank, 4, folder, store.endpoint, size) for rank in range(4)]
        ranks = [context.Process(target=as_rank, args=given) for given in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=300)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with {process.exitcode}")
        notes = Path(folder, "notes").read_text().splitlines()
    for side in SIDES:
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        store.counts()
        store.load(side, target, place="four")
        need = sum(tensor.numel() * 4 for tensor in target.values())
        notes.append(f"{side}, load, 4 ranks to 1: {amplification(store.counts(), need)}")
        assert all(torch.equal(state[name], target[name]) for name in state)
    return notes


def measure(rounds: int = 5, megabytes: int = 128, tensors: int = 64, latency: float = 0.02) -> Table:
    """Times of save and load on all sides and of the raw transfer; requests and read amplification as notes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    state = make_state(megabytes, tensors)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with server(latency) as endpoint, tempfile.NamedTemporaryFile() as raw:
        store = Store(endpoint)
        filesystem = S3FileSystem(**store.options)
        filesystem.mkdir("bench")
        for tensor in state.values():
            raw.write(tensor.numpy().data)
        raw.flush()
        sides = {f"save, {side}": lambda side=side: store.save(side, state) for side in SIDES}
        sides["put of the same bytes"] = lambda: timed(filesystem.put_file, raw.name, "bench/raw")
        sides |= {f"load, {side}": lambda side=side: store.load(side, target) for side in SIDES}
        sides["get of the same bytes"] = lambda: timed(filesystem.cat_file, "bench/raw")
        times = in_turns(rounds, sides)
        assert all(torch.equal(state[name], target[name]) for name in state)
        notes = count_alone(store, state) + count_ranks(store, state, (megabytes, tensors))
    if "s3torchconnector" not in SIDES:
        notes.append("s3torchconnector is not installed and was left out")
    title = f"{megabytes} MB in {tensors} tensors on S3 (moto, {latency * 1000:g} ms a request)"
    table = Table(f"{title}, torch {torch.__version__}", times, notes=notes)
    table.ratios += [("save, PyTorch", "save, airdata", 3.0), ("put of the same bytes", "save, airdata", 0.9)]
    table.ratios += [("load, PyTorch", "load, airdata", 3.0), ("get of the same bytes", "load, airdata", 0.9)]
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.02)
    print(measure(**vars(parser.parse_args())))
