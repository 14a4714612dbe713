"""Private memory of a loader worker for two million files, under fork and spawn, beside a Python list of paths.

Each measurement is a program of its own: it starts the workers, lets each read some batches, and looks at what of every
worker's memory nobody shares (USS: the private pages in ``smaps_rollup``). The same program on a thousand files is
subtracted, so what is left is what the list of files costs. A folder of a thousand real files under two thousand names
(links) stands for the two million.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import Dataset, IterableDataset

if TYPE_CHECKING:
    from report import Table

FILES_IN_FOLDER, FOLDERS, WORKERS, BATCHES = 1000, 2000, 4, 20
TARGET = 20.0


class Ours(IterableDataset):
    """The process that read each sample."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self):
        return (os.getpid() for path in self.source if os.path.getsize(path))


class Listed(Dataset):
    """What a first attempt holds: one ``str`` for each file. A worker touches all, as it will in an epoch or two."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.touched = False

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        if not self.touched:
            self.touched = bool(sum(map(len, self.paths)))
        return os.getpid() if self.paths[index] else 0


def private_mib(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024


def names(folders: int) -> list[str]:
    return [f"class{folder:04d}/image{file:04d}.jpg" for folder in range(folders) for file in range(FILES_IN_FOLDER)]


def program(side: str, directory: str, folders: int, method: str) -> None:
    """Print the largest private memory among the workers, in MiB."""
    import torch.utils.data

    from airdata import DataLoader, Manifest, UCVolumeDataset

    options = {"batch_size": 16, "num_workers": WORKERS, "multiprocessing_context": method, "prefetch_factor": 2}
    if side == "airdata":
        manifest = os.path.join(directory, f"{folders}.parquet")
        if not os.path.exists(manifest):
            Manifest.from_paths(names(folders), sizes=[9] * FILES_IN_FOLDER * folders).save(manifest)
        dataset = UCVolumeDataset(directory, shuffle=True, manifest=manifest, cache_dir=f"{directory}/cache")
        loader = DataLoader(Ours(dataset), **options)
    else:
        loader = torch.utils.data.DataLoader(Listed(names(folders)), shuffle=True, **options)
    workers: set[int] = set()
    for number, batch in enumerate(loader):
        workers.update(batch.tolist())
        if number >= BATCHES and len(workers) == WORKERS:
            print(max(map(private_mib, workers)))
            return


def measure(rounds: int = 5) -> Table:
    """All sides in turns."""
    from report import Table

    def run(*arguments: object) -> float:
        command = [sys.executable, __file__, *map(str, arguments)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "files")
        folder.mkdir()
        for number in range(FILES_IN_FOLDER):
            (folder / f"image{number:04d}.jpg").write_bytes(b"some data")
        for number in range(FOLDERS):
            Path(directory, f"class{number:04d}").symlink_to(folder)
        sides = [(side, method) for side in ("airdata", "list of paths") for method in ("fork", "spawn")]
        found: dict[str, list[float]] = {f"{side}, {method}": [] for side, method in sides}
        for number in range(min(rounds, 2)):  # memory hardly varies
            for side, method in sides[: len(sides) if number == 0 else 2]:  # and the list of paths takes long to make
                few, many = (run(side, directory, folders, method) for folders in (1, FOLDERS))
                found[f"{side}, {method}"].append(many - few)
    worst = max(statistics.median(found[f"airdata, {method}"]) for method in ("fork", "spawn"))
    return Table(
        f"private memory that {FILES_IN_FOLDER * FOLDERS:,} files cost a loader worker ({WORKERS} workers)",
        found,
        notes=[f"airdata at worst {worst:.1f} MiB (target: at most {TARGET:g} MiB)"],
        unit="MiB",
    )


if __name__ == "__main__":
    program(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
