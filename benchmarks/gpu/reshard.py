"""A sharded state saved by N ranks, loaded and saved by half as many, and loaded by N again: the same bits."""

from __future__ import annotations

import time
import warnings

import torch.distributed as dist

from airdata import CheckpointManager
from gpu.machine import Setting, across, join
from gpu.results import Result, publish
from gpu.state import State


def measure(setting: Setting) -> None:
    """Three launches, or the reason why there are none."""
    if setting.ranks == 1:
        result = Result("Resharding", ["what"], [["not run: it needs more than one rank"]])
        publish(setting.report, result)
        return
    half = setting.ranks // 2
    result = Result(
        f"Resharding {setting.gib:g} GiB over {setting.ranks}, {half} and {setting.ranks} ranks",
        ["ranks", "load, s", "save, s", "wrong tensors"],
    )
    for number, ranks in enumerate((setting.ranks, half, setting.ranks)):
        results = setting.launcher(ranks)(pass_on).distributed(setting, number)
        result.rows.append([ranks, *results[0]])
    result.checks.append(("every bit is the same on every rank", all(row[-1] in {"-", 0} for row in result.rows)))
    publish(setting.report, result)


def pass_on(setting: Setting, number: int) -> tuple[object, object, object]:
    """Load what the launch before has saved (the first: make it), check it, and save it for the next."""
    warnings.simplefilter("ignore")
    state = State.build(setting.gib, join(setting.device))
    load: float | str = "-"
    wrong: int | str = "-"
    with CheckpointManager(setting.path("steps"), keep_last=1, prove_first=False) as manager:
        if number:
            state.clear()
            across(0)
            began = time.perf_counter()
            restored = manager.restore(state.objects())
            load = across(time.perf_counter() - began)
            assert restored == number - 1, restored
            wrong = int(across(state.wrong(7), "SUM"))
        else:
            state.fill(7)
        save: float | str = "-"
        if number < 2:
            across(0)
            began = time.perf_counter()
            manager.save(number, state.objects()).result()
            save = across(time.perf_counter() - began)
    dist.destroy_process_group()
    return load, save, wrong
