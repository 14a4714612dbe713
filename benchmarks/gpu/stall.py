"""How long does a save hold training up, how long does it take, how long a load, and how much host memory?

CheckpointManager beside the plain page-locked copy of the same bytes, the three ways that torch brings, and a raw
write and read of the same bytes on the same disk. A stall is the slowest rank's, from the call until its state may be
changed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from typing_extensions import Self

from airdata import CheckpointManager, UCVolumeReader, UCVolumeWriter
from gpu.machine import Setting, across, in_parts, join, seconds_left, synchronize
from gpu.results import Result, publish
from gpu.slab import Slab, drop_from_page_cache
from gpu.state import State

SAVES = 3


def measure(setting: Setting) -> None:
    """All of it, in one launch."""
    setting.launcher()(in_rank).distributed(setting)


def in_rank(setting: Setting) -> None:
    warnings.simplefilter("ignore")
    device = join(setting.device)
    state = State.build(setting.gib, device)
    slab = Slab(state, device)

    def show(result: Result) -> None:
        if dist.get_rank() == 0:
            publish(setting.report, result)

    rows: list[list[object]] = []
    in_parts(
        lambda: rows.extend(against_the_copy(setting, state, slab, show)),
        lambda: rows.append(whole_rounds(setting, state, slab, show)),
        slab.close,
        lambda: torch_stalls(setting, state, rows, show),
    )
    dist.destroy_process_group()


# --- ours, and the memory it takes -----------------------------------------------------------------------------------


class PeakMemory:
    """The largest resident memory of this process while it is watched, beyond what it was before, in bytes."""

    def __enter__(self) -> Self:
        self._before = self.peak = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def added(self) -> int:
        return self.peak - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def against_the_copy(setting: Setting, state: State, slab: Slab, show: Callable[[Result], None]) -> list[list[object]]:
    """Stalls of CheckpointManager and of the copy, in turns; rows for the table of torch's ways."""
    copies = [slab.copy() for _ in range(3)]
    stalls, totals = [], []
    with CheckpointManager(setting.path("steps"), keep_last=1) as manager:
        with PeakMemory() as memory:
            for step in range(SAVES):
                state.fill(step)
                stall, total = timed_save(lambda step=step: manager.save(step, state.objects()), state.device)
                stalls.append(stall)
                totals.append(total)
                copies += [slab.copy() for _ in range(2)]
        state.clear()
        across(0)
        began = time.perf_counter()
        restored = manager.restore(state.objects())
        restore = across(time.perf_counter() - began)
        wrong = across(state.wrong(SAVES - 1), "SUM") if restored == SAVES - 1 else -1
    remove(setting.path("steps"))
    floor, later = statistics.median(copies), statistics.median(stalls[1:])
    staged, added = across(state.local_bytes, "SUM"), across(memory.added, "SUM")
    size = f"{staged / 2**30:.3g} GiB on {dist.get_world_size()} ranks"
    result = Result(
        f"Stall of CheckpointManager.save, {size}",
        ["what", "first, s", "second on, s", "until published, s"],
        [
            ["page-locked copy", copies[0], floor, "-"],
            ["airdata CheckpointManager", stalls[0], later, statistics.median(totals)],
        ],
        bars={
            "page-locked copy": floor,
            "airdata, second save on": later,
            "airdata, first save": stalls[0],
        },
    )
    result.check_at_most("stall over the page-locked copy, second save on", later / floor, 1.3)
    result.checks.append((f"restore gives back every bit, in {restore:.3g} s", wrong == 0))
    result.check_at_most("resident memory that saves add over staged bytes, all ranks", added / staged, 2.0)
    result.notes.append(f"page-locked copy: {staged / 1e9 / floor:,.1f} GB/s over all ranks")
    result.notes.append("the first save also allocates and locks its buffer, and is read back to prove it")
    show(result)
    return [
        ["page-locked copy", "second on", floor, "-"],
        ["airdata CheckpointManager", "second on", later, statistics.median(totals)],
    ]


def timed_save(save: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds until training may go on, and until the save is done, on the slowest rank."""
    synchronize(device)
    across(0)
    began = time.perf_counter()
    pending = save()
    if hasattr(pending, "staging_completion"):
        pending.staging_completion.result()
        pending = pending.upload_completion
    stall = across(time.perf_counter() - began)
    pending.result()
    return stall, across(time.perf_counter() - began)


# --- whole saves and loads -------------------------------------------------------------------------------------------


def whole_rounds(setting: Setting, state: State, slab: Slab, show: Callable[[Result], None]) -> list[object]:
    """One round, and a second where there is time for it and for torch's stalls after it; PyTorch's save as a row."""
    times: dict[str, list[float]] = {}
    round_seconds = 0.0
    for number in range(2):
        if number and seconds_left(setting) < 4 * round_seconds:
            break
        began = time.monotonic()
        whole_round(setting, state, slab, times, number)
        round_seconds = time.monotonic() - began
    slow = show_totals(times, across(state.local_bytes, "SUM"), show)
    return ["dcp.save", "each", slow, slow]


def whole_round(setting: Setting, state: State, slab: Slab, times: dict[str, list[float]], number: int) -> None:
    """Save and load once each way; one copy of the state lies on the disk at a time."""

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    folder = setting.path("whole")
    raw = os.path.join(folder, f"raw-{dist.get_rank()}")
    if dist.get_rank() == 0:
        os.makedirs(folder)
    across(0)
    note("write and fsync, no format", slab.write(raw))
    note("read, no format", slab.read(raw))
    drop(folder)
    note("read from disk, no format", slab.read(raw))
    remove(folder)
    sides = {"PyTorch": (FileSystemWriter, FileSystemReader), "airdata": (UCVolumeWriter, UCVolumeReader)}
    for side, (writer, reader) in sides.items():
        state.fill(100 + number)
        note(f"save, {side}", timed(slab, lambda w=writer: dcp.save(state.state_dict(), storage_writer=w(folder))))
        for how in ("load", "load from disk"):
            state.clear()
            if how == "load from disk":
                drop(folder)
            seconds = timed(slab, lambda r=reader: dcp.load(state.state_dict(), storage_reader=r(folder)))
            note(f"{how}, {side}", seconds)
            note("wrong tensors", across(state.wrong(100 + number), "SUM"))
        remove(folder)


def timed(slab: Slab, work: Callable[[], Any]) -> float:
    synchronize(slab.device)
    across(0)
    began = time.perf_counter()
    work()
    synchronize(slab.device)
    return across(time.perf_counter() - began)


def drop(folder: str) -> None:
    across(0)
    if dist.get_rank() == 0:
        drop_from_page_cache(folder)
    across(0)


def remove(folder: str) -> None:
    across(0)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    across(0)


def show_totals(times: dict[str, list[float]], size: float, show: Callable[[Result], None]) -> float:
    """The table of all of them; the seconds of PyTorch's save."""
    wrong = times.pop("wrong tensors")
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = Result(
        f"Whole saves and loads, {size / 2**30:.3g} GiB, one disk",
        ["what", "s", "GB/s"],
        [[name, median, size / 1e9 / median] for name, median in sorted(medians.items())],
        bars=dict(sorted(medians.items())),
    )
    for what in ("save", "load", "load from disk"):
        result.check_at_least(
            f"{what}, PyTorch over airdata", medians[f"{what}, PyTorch"] / medians[f"{what}, airdata"], 1.5
        )
    result.check_at_least(
        "save, raw write with fsync over airdata", medians["write and fsync, no format"] / medians["save, airdata"], 0.9
    )
    result.check_at_least(
        "load from disk, raw read over airdata",
        medians["read from disk, no format"] / medians["load from disk, airdata"],
        0.9,
    )
    result.checks.append(("every load gives back every bit", not any(wrong)))
    result.notes.append(f"{len(wrong) // 4} round(s); loads without 'from disk' find the files in the page cache")
    show(result)
    return medians["save, PyTorch"]


# --- torch's own asynchronous saves ----------------------------------------------------------------------------------


def torch_stalls(setting: Setting, state: State, others: list[list[object]], show: Callable[[Result], None]) -> None:
    """Twice each, since buffers may be reused; what fails is shown in words."""
    cuda = setting.device == "cuda"
    options = StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda
    )
    result = Result(
        "Stall of the ways that torch brings, same state", ["what", "save", "stall, s", "until done, s"], others
    )
    plain, pinned = "async_save, its default", "async_save, pinned stager"
    stager = DefaultStager(options)
    # The slowest comes last, where there may be no time for it.
    for name, number in ((plain, "first"), (pinned, "first"), (pinned, "second"), (plain, "second")):
        if seconds_left(setting) < 0 and name == plain and number == "second":
            result.rows.append([name, number, "no time left", "-"])
            continue
        words, seconds = attempt(setting, state, stager if name == pinned else None)
        result.rows.append([name, number, words or seconds[0], "-" if words else seconds[1]])
        if words and number == "second":
            again = f"{number}, with a new stager"
            stager = DefaultStager(options)
            words, seconds = attempt(setting, state, stager)
            result.rows.append([name, again, words or seconds[0], "-" if words else seconds[1]])
    stager.close()
    result.bars = {f"{row[0]}, {row[1]}": row[2] for row in result.rows if isinstance(row[2], float)}
    show(result)


def attempt(setting: Setting, state: State, stager: Any) -> tuple[str, tuple[float, float]]:
    """One asynchronous save of torch's: what went wrong on any rank, or nothing, and its times."""
    folder = setting.path("async")
    words, seconds = "", (0.0, 0.0)
    try:
        seconds = timed_save(
            lambda: dcp.async_save(state.state_dict(), storage_writer=FileSystemWriter(folder), async_stager=stager),
            state.device,
        )
    except BaseException as error:  # noqa: BLE001 - DCP's own error is no Exception
        words = f"{type(error).__name__}: {error}"[:200]
    remove(folder)
    return words, seconds
