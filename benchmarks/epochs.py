"""What the data benchmarks measure: one epoch over the files of a bucket; by airdata, and by the bare loop below it.

Every side does the same work: a loader's workers read each file whole and hand on its length, in batches of 32, and the
files are known beforehand, so that no side lists. Time is from ``iter(loader)`` to the last batch, the start of the
workers included; processor time is that of all processes of the side, a mount's daemon included.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from object_server import BUCKET, CREDENTIALS, ObjectServer, key
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

import airdata
from airdata.manifest import Manifest
from airdata.reading import fetches_at_once
from airdata.transport import FileInfo, open_transport
from airdata.volume import Volume

BATCH = 32
PREFETCH_FACTOR = 4


class Cost(NamedTuple):
    """Of an epoch: seconds, processor seconds, files."""

    seconds: float
    cpu_seconds: float
    files: int


@dataclass(frozen=True)
class Bucket:
    """A folder of the server's bucket, as one benchmark reads it.

    Attributes:
        server: where it lies.
        folder: its name.
        files: so many of its files are read.
        latency: seconds before each first byte.
        workers: processes that read.
        scratch: a local directory for what a side keeps.
    """

    server: ObjectServer
    folder: str
    files: int
    latency: float
    workers: int
    scratch: Path

    def of(self, files: int) -> Bucket:
        """The same with another number of files."""
        return replace(self, files=files)

    @property
    def options(self) -> dict[str, str]:
        """For fsspec."""
        return {**CREDENTIALS, "endpoint_url": self.server.url(self.latency)}

    @property
    def keys(self) -> list[str]:
        """Of the files that are read."""
        return [key(self.folder, number) for number in range(self.files)]

    @property
    def volume(self) -> Volume:
        """The bucket for our own transport."""
        return Volume.of(f"s3://{BUCKET}", self.options)

    @property
    def manifest(self) -> Manifest:
        """The files that are read, for a dataset that need not list them."""
        return Manifest.from_files(self.listed())

    def listed(self) -> list[FileInfo]:
        """The files that are read, as a listing gives them."""
        wanted = set(self.keys)
        found = open_transport(self.volume).list(self.folder)
        return [file for file in found if file.path in wanted]

    def new_directory(self) -> str:
        """An empty directory of this benchmark."""
        return tempfile.mkdtemp(dir=self.scratch)


def read(path: str) -> int:
    """What every side does with a local file."""
    with open(path, "rb") as file:
        return len(file.read())


def cost(loader: Iterable[Any], files: int, daemon: psutil.Process | None = None) -> Cost:
    """Run an epoch."""
    cpu, start = _cpu(daemon), time.perf_counter()
    iterator = iter(loader)
    count = sum(len(batch) for batch in iterator)
    seconds = time.perf_counter() - start
    assert count == files, f"{count} of {files} files came"
    del iterator  # waits for its workers, whose time is known only then
    return Cost(seconds, _cpu(daemon) - cpu, files)


def _cpu(daemon: psutil.Process | None) -> float:
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    used = sum(usage.ru_utime + usage.ru_stime for usage in mine)
    return used + (sum(daemon.cpu_times()[:2]) if daemon else 0.0)


def torch_loader(dataset: Dataset, workers: int) -> TorchLoader:
    """PyTorch's own, as all peers use it."""
    return TorchLoader(dataset, batch_size=BATCH, num_workers=workers, prefetch_factor=PREFETCH_FACTOR)


# --- airdata, and its ceiling ---


class Read(IterableDataset):
    """The usual wrapper: reads what the paths of a volume lead to."""

    def __init__(self, source: airdata.UCVolumeDataset) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return map(read, self.source)


def airdata_loader(bucket: Bucket, **options: Any) -> airdata.DataLoader:
    """Ours, with the defaults of everything that is not given."""
    source = airdata.UCVolumeDataset(bucket.volume, manifest=bucket.manifest, min_free_bytes=0, **options)
    return airdata.DataLoader(
        Read(source), batch_size=BATCH, num_workers=bucket.workers, prefetch_factor=PREFETCH_FACTOR
    )


def with_airdata(bucket: Bucket) -> Cost:
    """A cold epoch: the cache is empty, and fills."""
    return cost(airdata_loader(bucket, cache_dir=bucket.new_directory()), bucket.files)


def with_bare_loop(bucket: Bucket) -> Cost:
    """The ceiling: our transport in as many processes and with as many requests under way, and nothing else."""
    directory, files = bucket.new_directory(), bucket.listed()
    processes = multiprocessing.get_context("fork")

    def fetch(share: Sequence[FileInfo]) -> None:
        transport = open_transport(bucket.volume)

        def one(file: FileInfo) -> int:
            path = f"{directory}/{file.path.replace('/', '-')}"
            transport.get(file.path, path, file.version)
            return read(path)

        with ThreadPoolExecutor(fetches_at_once(None, bucket.workers)) as threads:
            for _ in threads.map(one, share):
                pass

    cpu, start = _cpu(None), time.perf_counter()
    # Daemons, as loader workers are: in other processes the transport takes its slower way.
    members = [
        processes.Process(target=fetch, args=(files[n :: bucket.workers],), daemon=True) for n in range(bucket.workers)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
        assert member.exitcode == 0
    return Cost(time.perf_counter() - start, _cpu(None) - cpu, bucket.files)
