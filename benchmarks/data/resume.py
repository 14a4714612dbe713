"""Time to the first sample: with a saved manifest of a million files, and after a resume near the end of an epoch.

In the training process, without workers, so that no start of a process hides what is measured. A folder of a thousand
real files under a thousand names (links) stands for the million.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from airdata import DataLoader, Manifest, UCVolumeDataset

if TYPE_CHECKING:
    from report import Table

FILES_IN_FOLDER, FOLDERS = 1000, 1000
SAMPLES = FILES_IN_FOLDER * FOLDERS


def first_sample(directory: str, manifest: str) -> float:
    """From the path of a saved manifest to a path that opens."""
    start = time.perf_counter()
    path = next(iter(UCVolumeDataset(directory, shuffle=True, manifest=manifest)))
    took = time.perf_counter() - start
    assert Path(path).read_bytes() == b"some data"
    return took


def first_batch(dataset: UCVolumeDataset, served: int) -> float:
    """From the loading of a state to the first batch, in a loader of its own."""
    loader = DataLoader(dataset, batch_size=8, num_workers=0)
    state = {**dataset.state_dict(), "epoch": 3, "samples_served": served}
    start = time.perf_counter()
    loader.load_state_dict(state)
    batches = iter(loader)
    batch = next(batches)
    took = time.perf_counter() - start
    assert len(batch) == 8
    batches.close()
    return took


def measure(rounds: int = 5) -> Table:
    """Medians of many: each takes milliseconds."""
    from report import Table, in_turns

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "files")
        folder.mkdir()
        for number in range(FILES_IN_FOLDER):
            (folder / f"image{number:04d}.jpg").write_bytes(b"some data")
        paths = []
        for number in range(FOLDERS):
            Path(directory, f"class{number:04d}").symlink_to(folder)
            paths += [f"class{number:04d}/image{file:04d}.jpg" for file in range(FILES_IN_FOLDER)]
        manifest, saved = Manifest.from_paths(paths, sizes=[9] * SAMPLES), f"{directory}/manifest.parquet"
        manifest.save(saved)
        times = in_turns(rounds, {"saved manifest": lambda: first_sample(directory, saved)})
        dataset = UCVolumeDataset(directory, shuffle=True, manifest=manifest)
        places = {"start at 0 %": 0, "resume at 90 %": SAMPLES * 9 // 10}
        times |= in_turns(
            10 * rounds, {name: lambda served=served: first_batch(dataset, served) for name, served in places.items()}
        )
    table = Table(f"time to the first sample of {SAMPLES:,} files", times)
    table.notes += [
        f"saved manifest: {table.median('saved manifest'):.2f} s (target: at most 1 s)",
        f"resume at 90 % / start at 0 %: {table.ratio('resume at 90 %', 'start at 0 %'):.2f} (target: at most 1.2)",
    ]
    return table
