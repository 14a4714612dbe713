"""Many loaders, left at any point and started again: nothing piles up, and nothing is left after Ctrl-C."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time

import fsspec
import psutil
import pytest

from airdata import DataLoader, UCVolumeDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FILES, BATCH = 600, 20


@pytest.fixture
def dataset(tmp_path):
    """Files that go through prefetch and cache; forked workers inherit the memory they lie in."""
    store = fsspec.filesystem("memory")
    for number in range(FILES):
        store.pipe_file(f"/soak/{number:04d}", b"content")
    yield UCVolumeDataset("memory://soak", shuffle=True, cache_dir=tmp_path / "cache", min_free_bytes=0)
    store.rm("/soak", recursive=True)


def held() -> tuple[int, int, int]:
    me = psutil.Process()
    return threading.active_count(), len(me.children(recursive=True)), me.num_fds()


@pytest.mark.parametrize(
    "samples", [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_loaders_left_at_any_point_and_started_again_pile_up_nothing(dataset, samples) -> None:
    dice, read = random.Random(samples), 0
    persistent = DataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True)

    def some(loader: DataLoader) -> int:
        count, most = 0, dice.randint(1, FILES // BATCH)
        for batch in loader:
            count += len(batch)
            if count >= most * BATCH:
                break
        return count

    def turn(workers: int) -> int:
        return some(persistent) + some(DataLoader(dataset, batch_size=BATCH, num_workers=workers))

    for workers in range(3):  # whatever is opened once for all
        turn(workers)
    gc.collect()
    before, memory = held(), psutil.Process().memory_info().rss
    while read < samples:
        read += turn(dice.randrange(3))
    gc.collect()
    deadline = time.monotonic() + 60  # the threads that feed the queues end by themselves
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, (before, held(), threading.enumerate())
        time.sleep(0.05)
    assert psutil.Process().memory_info().rss - memory < 64 << 20


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_interrupt_ends_the_program_and_its_workers(program, volume, tmp_path, method) -> None:
    code = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from airdata import DataLoader, UCVolumeDataset

        if __name__ == "__main__":
            os.setpgid(0, 0)
            dataset = UCVolumeDataset(sys.argv[1])
            loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=sys.argv[2])
            print("ready", flush=True)
            try:
                while True:
                    for batch in loader:
                        print("batch", flush=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                raise
    """
    process = program(code, volume(200), method)
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "batch\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output, errors = process.communicate(timeout=120)
    assert output.endswith("interrupted\n")
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert psutil.wait_procs(workers, timeout=60)[1] == []
