"""Images per second that reach a ResNet-50 from a store with latency, and the share of its time that the GPU waits.

The same store, decoder, batch size and number of workers for ours and for torch's own loader, which reads each file
from the store in each epoch; and once from the local disk, which is what a second epoch of ours can come to. Then the
count at the source: however many ranks and workers, each cold file is read once.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from airdata import DataLoader, UCVolumeDataset
from gpu.images import CLASSES, CROP, Ours, Stock, how_decoded, write_images
from gpu.latency_store import LATENCY, READS, reads
from gpu.machine import Setting, across, in_parts, join, synchronize
from gpu.resnet import resnet
from gpu.results import Result, publish

PREFETCH = 256
STOCK_SECONDS = 6.0  # of each of its epochs: it gets as many images as it will read in that
ONCE_RANKS, ONCE_WORKERS = 8, 6
LOCAL = "PyTorch, local files"


def measure(setting: Setting) -> None:
    """Both questions."""
    # On H200s an epoch of twenty seconds, beside which the one first batch is little.
    images = 192 if setting.small else 24_576 * (1 + 2 * setting.ranks)
    write_images(setting.path("store"), images)
    latency = 0.005 if setting.small else 0.05
    env = {LATENCY: str(latency)}
    cores = os.cpu_count() or 1
    workers = max(1, min(14, cores // setting.ranks - 1))
    batch = 8 if setting.small else 128
    wave = batch * setting.ranks * workers  # while every worker makes one batch
    stock = images if setting.small else min(images, wave * max(1, round(STOCK_SECONDS / (batch * latency))))
    launch = setting.launcher(env=env)(feed)
    in_parts(
        lambda: launch.distributed(setting, latency, workers, batch, stock),
        lambda: publish(setting.report, read_once(setting, latency)),
    )


# --- in a rank -------------------------------------------------------------------------------------------------------


def feed(setting: Setting, latency: float, workers: int, batch: int, stock_images: int) -> None:
    """Measure the GPU alone, our two epochs, and the stock loader's two."""
    device = join(setting.device)
    step, network = make_step(setting, device)
    alone = gpu_alone(step, batch, device)
    url = f"latency://{setting.path('store')}/train"
    options = {
        "batch_size": batch,
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
        "prefetch_factor": 2,
        "persistent_workers": True,
        "drop_last": True,
    }
    files = UCVolumeDataset(
        url, shuffle=True, uneven="drop", cache_dir=setting.path("cache"), min_free_bytes=0, prefetch=PREFETCH
    )
    ours = DataLoader(Ours(files), **options)
    began = time.perf_counter()
    len(files)
    listing = across(time.perf_counter() - began)
    result = Result(
        f"Feeding {network} on {dist.get_world_size()} ranks from a store with {1000 * latency:.0f} ms latency",
        ["what", "epoch", "images/s", "of the GPU alone", "GPU waits", "GPU waits after the first batch", "images"],
        [["GPU alone", "-", alone, "100%", "-", "-", "-"]],
        unit="images per second",
    )
    rates: dict[str, float] = {"GPU alone": alone}
    waits: dict[str, float] = {}
    everything = [
        f"{path.parent.name}/{path.name}" for path in sorted(Path(setting.path("store/train")).rglob("*.jpg"))
    ]
    local = everything[: max(stock_images, len(everything) // 2)]
    for name, dataset in {
        "airdata": None,
        "PyTorch": Stock(url, everything[:stock_images]),
        LOCAL: Stock(setting.path("store/train"), local),
    }.items():
        sampler = None
        loader: Iterable[Any] = ours
        if dataset is not None:
            sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), drop_last=True)
            loader = TorchLoader(dataset, sampler=sampler, **options)
        for epoch in (1,) if name == LOCAL else (1, 2):
            if sampler is not None:
                sampler.set_epoch(epoch)
            seen = one_epoch(loader, step, device)
            count = int(across(seen.images, "SUM"))
            rate = count / across(seen.seconds)
            waiting, later = (across(share, "SUM") / dist.get_world_size() for share in (seen.waiting, seen.later))
            label = f"{name}, epoch {epoch}"
            rates[label], waits[label] = rate, waiting
            result.rows.append([name, epoch, rate, f"{rate / alone:.0%}", f"{waiting:.1%}", f"{later:.1%}", count])
            if device.type == "cuda" and name == "airdata":
                result.checks.append((f"batches of epoch {epoch} arrive in page-locked memory", seen.pinned))
    result.bars = rates
    result.check_at_most("share of the second epoch that the GPU waits", waits["airdata, epoch 2"], 0.02)
    beside_local = rates["airdata, epoch 2"] / rates[f"{LOCAL}, epoch 1"]
    result.notes.append(f"epoch 2: {beside_local:.2f} times the images of PyTorch's loader on local files")
    for epoch in (1, 2):
        stock = rates[f"PyTorch, epoch {epoch}"]
        ratios = f"{rates[f'airdata, epoch {epoch}'] / stock:.1f} times the images of PyTorch's loader"
        result.notes.append(f"epoch {epoch}: {ratios}; the GPU alone would take {alone / stock:.1f} times")
    result.notes += [
        f"{how_decoded()}; batches of {batch} for each rank, {workers} workers each; {PREFETCH} files in flight",
        f"listing {len(files.manifest)} files took {listing:.2f} s, which no epoch counts",
        "the store is an fsspec filesystem over a local folder that waits before each answer",
        "PyTorch's loader reads from the store in every epoch, ours in the first only",
        "one worker makes the first batch of an epoch after the epoch has begun, whatever the loader",
    ]
    if dist.get_rank() == 0:
        publish(setting.report, result)
    across(0)
    dist.destroy_process_group()


def make_step(setting: Setting, device: torch.device) -> tuple[Callable[[torch.Tensor, torch.Tensor], None], str]:
    """A training step in bf16 that does not wait for the GPU, and the network's name."""
    torch.backends.cudnn.benchmark = True
    network, name = resnet(CLASSES, small=setting.small)
    model: torch.nn.Module = network.to(device, memory_format=torch.channels_last)
    if dist.get_world_size() > 1:
        ids = [device] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        pixels = images.to(device, non_blocking=True).to(memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(pixels.bfloat16().div_(255)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, name


def gpu_alone(step: Callable[..., None], batch: int, device: torch.device) -> float:
    """Images per second of all ranks when the batch is there already."""
    # Noise, as a photograph nearly is: a GPU multiplies zeros with less power, and so at a higher clock.
    images = torch.randint(256, (batch, 3, CROP, CROP), dtype=torch.uint8, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    rounds = 2 if device.type == "cpu" else 20
    for _ in range(rounds):
        step(images, labels)
    synchronize(device)
    across(0)
    began = time.perf_counter()
    for _ in range(rounds):
        step(images, labels)
    synchronize(device)
    return dist.get_world_size() * rounds * batch / across(time.perf_counter() - began)


@dataclass(frozen=True)
class Epoch:
    """What one rank saw.

    Attributes:
        images: that many.
        seconds: from before the first batch to the end of the last step.
        waiting: share of the time that the device had nothing to do.
        later: the same after the first batch had come.
        pinned: whether batches lay in page-locked memory.
    """

    images: int
    seconds: float
    waiting: float
    later: float
    pinned: bool


def one_epoch(loader: Iterable[Any], step: Callable[..., None], device: torch.device) -> Epoch:
    """Train on every batch.

    On a GPU the gaps are taken between events on its own stream: the host may be waiting while the GPU is not.
    """
    synchronize(device)
    across(0)
    clock = GpuClock() if device.type == "cuda" else HostClock()
    began, count, pinned = time.perf_counter(), 0, False
    clock.done()
    for images, labels in loader:
        clock.arrived()
        pinned = pinned or (device.type == "cuda" and images.is_pinned())
        step(images, labels)
        clock.done()
        count += len(images)
    synchronize(device)
    seconds = time.perf_counter() - began
    gaps = clock.gaps()
    first, later = gaps[0], sum(gaps[1:])
    return Epoch(count, seconds, (first + later) / seconds, later / max(seconds - first, 1e-9), pinned)


class GpuClock:
    """The times between the end of a step and the beginning of the next, on the GPU."""

    def __init__(self) -> None:
        self._ends: list[torch.cuda.Event] = []
        self._begins: list[torch.cuda.Event] = []

    def arrived(self) -> None:
        self._begins.append(self._now())

    def done(self) -> None:
        self._ends.append(self._now())

    def gaps(self) -> list[float]:
        """In seconds; call it when the GPU is through."""
        return [end.elapsed_time(begin) / 1000 for end, begin in zip(self._ends, self._begins, strict=False)]

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class HostClock:
    """The same on the CPU, whose steps are over when they return."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._begins: list[float] = []

    def arrived(self) -> None:
        self._begins.append(time.perf_counter())

    def done(self) -> None:
        self._ends.append(time.perf_counter())

    def gaps(self) -> list[float]:
        return [begin - end for end, begin in zip(self._ends, self._begins, strict=False)]


# --- counted at the source -------------------------------------------------------------------------------------------


def read_once(setting: Setting, latency: float) -> Result:
    """What the source is asked for by eight ranks of six workers each, on the CPU."""
    ranks, workers = (2, 2) if setting.small else (ONCE_RANKS, ONCE_WORKERS)
    names = sorted(Path(setting.path("store/train")).rglob("*.jpg"))[: 96 if setting.small else 1024]
    for name in names:
        link = Path(setting.path("once"), name.parent.name, name.name)
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(name, link)
    result = Result(
        f"Reads of {len(names)} cold files, {ranks} ranks with {workers} workers each",
        ["how", "epoch", "delivered", "source reads"],
    )
    for how in ("each rank its share", "every rank all files"):
        log = setting.path(f"reads-{len(result.rows)}")
        env = {LATENCY: str(latency), READS: log, "CUDA_VISIBLE_DEVICES": ""}
        launch = setting.launcher(ranks, env=env)(read_all)
        marks = launch.distributed(setting.path("once"), f"{log}-cache", log, workers, alone=how.startswith("every"))
        seen = reads(log)
        after_first = max(mark for _, mark in marks)
        result.rows.append([how, 1, sum(counts[0] for counts, _ in marks), after_first])
        result.rows.append([how, 2, sum(counts[1] for counts, _ in marks), len(seen) - after_first])
        once = len(seen) == len(names) and set(Counter(seen).values()) == {1}
        result.checks.append((f"{how}: every file exactly once, in two epochs", once and after_first == len(seen)))
    return result


def read_all(folder: str, cache: str, log: str, workers: int, *, alone: bool) -> tuple[list[int], int]:
    """Two shuffled epochs; what each delivered here, and the reads of the source when all ranks had ended the first."""
    join("cpu")
    import gpu.latency_store  # noqa: F401 - registers the store

    who = {"rank": 0, "world_size": 1} if alone else {}
    files = UCVolumeDataset(f"latency://{folder}", shuffle=True, cache_dir=cache, min_free_bytes=0, **who)
    loader = DataLoader(files, batch_size=16, num_workers=workers, persistent_workers=True)
    counts, mark = [], 0
    for epoch in range(2):
        counts.append(sum(len(batch) for batch in loader))
        across(0)
        if not epoch:
            mark = len(reads(log))
            across(0)
    dist.destroy_process_group()
    return counts, mark
