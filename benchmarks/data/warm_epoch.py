"""A warm epoch, every file on local disk, against a plain PyTorch dataset and against a mount of the store.

The plain dataset reads the same number of files of the same size from a local directory, in a shuffled order as well.
A sample is a JPEG of 110 KB that is decoded (the usual case), a file of 110 KB that is only read, or one of 4 KB, where
what a loader does for itself weighs most. Workers stay from epoch to epoch, so that starting them is not measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
from epochs import Bucket
from object_server import ObjectServer
from peers import mounted, peers
from report import Table, in_turns
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from airdata import DataLoader, UCVolumeDataset

BATCH, WORKERS = 32, 2
ON_THE_MOUNT = 96  # files; it reads each from the store, 50 ms away
TARGET_PLAIN, TARGET_MOUNT = 0.95, 15.0

Work = Callable[[str], int]


class Case(NamedTuple):
    """What is done with how many files of what content."""

    title: str
    files: int
    work: Work
    content: Callable[[int], bytes]


def read(path: str) -> int:
    """The file as bytes."""
    with open(path, "rb") as file:
        return len(file.read())


def decode(path: str) -> int:
    """The file as an image."""
    from PIL import Image

    with Image.open(path) as image:
        return int(np.asarray(image.convert("RGB")).shape[0])


class Plain(Dataset):
    def __init__(self, paths: list[str], work: Work) -> None:
        self.paths, self.work = paths, work

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return self.work(self.paths[index])


class Ours(IterableDataset):
    def __init__(self, files: UCVolumeDataset, work: Work) -> None:
        self.files, self.work = files, work

    def __iter__(self) -> Iterator[int]:
        return map(self.work, self.files)


def photograph(seed: int) -> bytes:
    """A JPEG of some 110 KB: 500 by 375, as ImageNet's are, of smooth noise."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 255, (94, 125, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=97)
    return buffer.getvalue()


def epoch(loader: Any, files: int) -> float:
    """Milliseconds for each file."""
    start = time.perf_counter()
    samples = sum(len(batch) for batch in loader)
    assert samples == files
    return 1000 * (time.perf_counter() - start) / files


def measure(rounds: int = 5, *, quick: bool = False) -> list[Table]:
    """Three kinds of samples, and the mount."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    cases = [
        Case("JPEGs of 110 KB that are decoded", 768, decode, photograph),
        Case("files of 110 KB that are read", 2048, read, lambda seed: np.random.default_rng(seed).bytes(110_000)),
        Case("files of 4 KB that are read", 4096, read, lambda seed: np.random.default_rng(seed).bytes(4_000)),
    ]
    if importlib.util.find_spec("PIL") is None:
        cases = cases[1:]
    return [
        *(_against_plain(rounds, case._replace(files=128) if quick else case) for case in cases),
        _against_mount(rounds, quick=quick),
    ]


def _against_plain(rounds: int, case: Case) -> Table:
    title, files, work, content = case
    with tempfile.TemporaryDirectory() as folder:
        # A URL, so that the files go through the cache as those of a bucket do; forked workers inherit the memory.
        store, name = fsspec.filesystem("memory"), f"/warm{os.path.basename(folder)}"
        different = [content(number) for number in range(16)]
        for number in range(files):
            store.pipe_file(f"{name}/class{number % 10}/{number:05d}.jpg", different[number % 16])
            path = Path(folder, "local", f"class{number % 10}", f"{number:05d}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(different[number % 16])
        paths = [str(path) for path in sorted(Path(folder, "local").rglob("*.jpg"))]
        source = UCVolumeDataset(f"memory:/{name}", shuffle=True, cache_dir=f"{folder}/cache", min_free_bytes=0)
        options = {"batch_size": BATCH, "num_workers": WORKERS, "prefetch_factor": 4, "persistent_workers": True}
        ours = DataLoader(Ours(source, work), **options)
        plain = TorchLoader(Plain(paths, work), shuffle=True, **options)
        times = in_turns(rounds, {"plain torch": lambda: epoch(plain, files), "airdata": lambda: epoch(ours, files)})
        store.rm(name, recursive=True)
    table = Table(f"warm epoch, {title}, {WORKERS} workers", times, unit="ms per file")
    table.ratios.append(("plain torch", "airdata", TARGET_PLAIN))
    more = 1000 * WORKERS * (table.median("airdata") - table.median("plain torch"))
    table.notes.append(f"airdata takes {more:.0f} µs of a worker's time more for a file")
    return table


def _against_mount(rounds: int, *, quick: bool) -> Table:
    files = ON_THE_MOUNT // 4 if quick else 4 * ON_THE_MOUNT
    sides, left_out = peers()
    with ObjectServer.start({"warm": (files, 110_000)}, (0.05,)) as server, tempfile.TemporaryDirectory() as scratch:
        bucket = Bucket(server, "warm", files, 0.05, WORKERS, Path(scratch))
        source = UCVolumeDataset(f"{bucket.volume.url}/warm", storage_options=bucket.options, shuffle=True,
                                 cache_dir=f"{scratch}/cache", min_free_bytes=0)  # fmt: skip
        options = {"batch_size": 8, "num_workers": WORKERS, "prefetch_factor": 4, "persistent_workers": True}
        ours = DataLoader(Ours(source, read), **options)
        epoch(ours, files)
        before = server.sent()
        measured = {"airdata": lambda: epoch(ours, files)}
        with contextlib.ExitStack() as stack:
            if "torch on a mount" in sides:
                directory, _ = stack.enter_context(mounted(bucket))
                paths = [f"{directory}/{name}" for name in bucket.keys][:ON_THE_MOUNT]
                on_mount = TorchLoader(Plain(paths, read), shuffle=True, **options)
                measured["torch on a mount"] = lambda: epoch(on_mount, len(paths))
            times = in_turns(1 if quick else min(rounds, 3), measured, warm_up=False)
            ours_alone = "torch on a mount" not in measured
            read_again = server.sent().gets - before.gets if ours_alone else None
    ratios = [] if ours_alone else [("torch on a mount", "airdata", TARGET_MOUNT)]
    notes = left_out if read_again is None else [*left_out, f"airdata asked the store {read_again} times"]
    title = f"warm epoch, files of 110 KB that are read, {WORKERS} workers, store 50 ms away"
    return Table(title, times, ratios, notes, unit="ms per file")
