"""A warm epoch, every file in the cache, against a plain PyTorch dataset on the same local files.

500 files of 110 KB (a usual JPEG) and two loader workers; each sample is read whole and summed, which is far less than
decoding costs, so the ratio of real work is nearer to one.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np
from report import Table, in_turns
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from airdata import DataLoader, UCVolumeDataset

FILES, SIZE, BATCH, WORKERS = 500, 110_000, 32, 2


def work(path: str) -> int:
    """What is done with a file."""
    with open(path, "rb") as file:
        return int(np.frombuffer(file.read(), dtype=np.uint8).sum())


class Plain(Dataset):
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return work(self.paths[index])


class Ours(IterableDataset):
    def __init__(self, files: UCVolumeDataset) -> None:
        self.files = files

    def __iter__(self):
        return map(work, self.files)


def epoch(loader) -> float:
    start = time.perf_counter()
    samples = sum(len(batch) for batch in loader)
    assert samples == FILES
    return time.perf_counter() - start


def measure(rounds: int = 5) -> Table:
    """Both loaders with persistent workers, so that starting them is not measured."""
    with tempfile.TemporaryDirectory() as folder:
        # A URL, so that the files go through the cache as those of a bucket do; forked workers inherit the memory.
        store = fsspec.filesystem("memory")
        for number in range(FILES):
            content = np.random.default_rng(number).bytes(SIZE)
            store.pipe_file(f"/warm/class{number % 10}/{number:05d}.jpg", content)
            path = Path(folder, "local", f"class{number % 10}", f"{number:05d}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        paths = [str(path) for path in sorted(Path(folder, "local").rglob("*.jpg"))]
        source = UCVolumeDataset("memory://warm", shuffle=True, cache_dir=f"{folder}/cache", min_free_bytes=0)
        options = {"batch_size": BATCH, "num_workers": WORKERS, "prefetch_factor": 4, "persistent_workers": True}
        ours = DataLoader(Ours(source), **options)
        plain = TorchLoader(Plain(paths), shuffle=True, **options)
        times = in_turns(rounds, {"plain torch": lambda: epoch(plain), "airdata": lambda: epoch(ours)})
    return Table(
        f"warm epoch, {FILES} files of {SIZE // 1000} KB, {WORKERS} workers", times, [("plain torch", "airdata", 0.95)]
    )
