"""What a node reads from the store: 8 processes over two epochs, and a second epoch with too small a cache.

Each of the 8 processes reads the whole dataset in an order of its own, as careless jobs do, so that every file is asked
for 8 times in each epoch. Then one job of 4 workers shuffles through a dataset of which only a part fits in the cache.
The server counts; what was read is exact, and no time is measured. The numbers are shares of the dataset.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from pathlib import Path

from epochs import Bucket, airdata_loader
from object_server import ObjectServer
from report import Table

import airdata
from airdata.manifest import Manifest

PROCESSES, WORKERS = 8, 4
SIZE = 110_000
# At half the dataset LRU hits 0.15 of a shuffled epoch, and keeping what is there 0.50, which is the best there is.
CACHES = {"a quarter": (0.25, 0.24), "half": (0.5, 0.48), "three quarters": (0.75, 0.72)}


def measure(rounds: int = 1, *, quick: bool = False) -> list[Table]:
    """Counts do not vary, so once is enough."""
    del rounds
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    files = 128 if quick else 1024
    with ObjectServer.start({"data": (files, SIZE)}) as server, tempfile.TemporaryDirectory() as scratch:
        bucket = Bucket(server, "data", files, 0.0, 2 if quick else WORKERS, Path(scratch))
        return [_one_node(bucket), _small_caches(bucket, ["half"] if quick else list(CACHES))]


def _one_node(bucket: Bucket) -> Table:
    directory, manifest = bucket.new_directory(), bucket.manifest
    processes = multiprocessing.get_context("fork")
    read = []
    for epoch in range(2):
        before = bucket.server.sent().bytes
        members = [
            processes.Process(target=_read_all, args=(bucket, manifest, directory, seed, epoch), daemon=True)
            for seed in range(PROCESSES)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
            assert member.exitcode == 0
        read.append((bucket.server.sent().bytes - before) / (bucket.files * SIZE))
    return Table(
        f"source bytes of a node, {PROCESSES} processes that each read all {bucket.files} files",
        {"first epoch": [read[0]], "second epoch": [read[1]]},
        notes=["target: 1.00, then 0"],
        unit="of the dataset",
    )


def _read_all(bucket: Bucket, manifest: Manifest, directory: str, seed: int, epoch: int) -> None:
    source = airdata.UCVolumeDataset(
        bucket.volume, manifest=manifest, shuffle=True, seed=seed, cache_dir=directory, min_free_bytes=0
    )
    source.set_epoch(epoch)
    assert sum(1 for _ in source) == bucket.files


def _small_caches(bucket: Bucket, names: list[str]) -> Table:
    found: dict[str, list[float]] = {}
    notes = []
    for name in names:
        share, target = CACHES[name]
        room = int(share * bucket.files * SIZE)
        loader = airdata_loader(bucket, cache_dir=bucket.new_directory(), cache_bytes=room, shuffle=True)
        for _ in loader:
            pass
        before, counted = bucket.server.sent(), loader.stats().files
        for _ in loader:
            pass
        after, now = bucket.server.sent(), loader.stats().files
        hits = (now.hits - counted.hits) / bucket.files
        read = (after.bytes - before.bytes) / (bucket.files * SIZE)
        found[f"hits, cache of {name}"], found[f"read, cache of {name}"] = [hits], [read]
        notes.append(f"cache of {name}: hit rate {hits:.3f} (target: at least {target:g}), source read {read:.3f}")
    return Table("second epoch, shuffled, with a cache of a part of the dataset", found, [], notes, "of the dataset")
