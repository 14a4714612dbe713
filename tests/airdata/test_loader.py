"""airdata.DataLoader: PyTorch's, that knows what the training loop has received."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from airdata import Checkpointable, DataLoader, Manifest, UCVolumeDataset
from airdata.errors import BadFilesError, FetchError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*ranks get one batch less")


def names(batches) -> list[str]:
    return [os.path.basename(path) for batch in batches for path in batch]


class Decode(IterableDataset):
    """One sample from each file."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self):
        for path in self.source:
            yield int(os.path.basename(path)[4:9])


class Expand(Decode):
    """Three samples from each file."""

    def __iter__(self):
        for number in super().__iter__():
            yield from (number * 10 + part for part in range(3))


class Dice(Decode):
    """What each file's worker throws."""

    def __iter__(self):
        for _ in self.source:
            yield torch.randint(1 << 30, ()).item()


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_takes_nothing_from_the_global_generator(volume, workers) -> None:
    # Otherwise a resumed run, which makes one iterator more, would go on with another dropout: its losses differed.
    loader = DataLoader(Decode(UCVolumeDataset(volume(8))), batch_size=2, num_workers=workers)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(loader)
    assert torch.equal(torch.rand(3), expected)


def test_workers_have_other_seeds_in_each_epoch_and_the_same_in_each_run(volume) -> None:
    directory = volume(8)

    def epochs() -> list[list[int]]:
        torch.manual_seed(5)
        loader = DataLoader(Dice(UCVolumeDataset(directory)), batch_size=None, num_workers=2)
        return [list(loader), list(loader)]

    first, second = epochs()
    assert len({*first, *second}) == 16
    assert epochs() == [first, second]


# --- cover, with real workers ---


@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
@pytest.mark.parametrize(
    "topology",
    [(0, 1, 2, 2), (1, 2, 2, 3), (13, 2, 3, 2), (23, 3, 1, 4), (24, 4, 2, 3), (10, 1, 0, 4)],
)
def test_loaders_cover_the_epoch_as_the_mode_says(volume, topology, uneven) -> None:
    n, world, workers, batch = topology
    if n == 0:
        directory, manifest = volume(1), Manifest.from_paths([])
    else:
        directory, manifest = volume(n), None
    options = {"shuffle": True, "uneven": uneven, "manifest": manifest}
    ranks = []
    for rank in range(world):
        loader = DataLoader(
            UCVolumeDataset(directory, rank=rank, world_size=world, **options), batch_size=batch, num_workers=workers
        )
        ranks.append([names([got]) for got in loader])
        assert len(ranks[-1]) == len(loader)
    served = [name for step in itertools.zip_longest(*ranks, fillvalue=[]) for got in step for name in got]
    order = [os.path.basename(path) for path in UCVolumeDataset(directory, **{**options, "uneven": "keep"})]
    if uneven == "keep":
        assert served == order
    elif uneven == "drop":
        assert served == order[: n - n % (world * batch)]
    else:
        assert served[:n] == order
        assert set(served) <= set(order)
        assert len(served) - n < world * batch
    if uneven != "keep":
        assert len({len(got) for got in ranks}) == 1
        assert {len(one) for got in ranks for one in got} <= {batch}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_does_not_depend_on_the_number_of_workers(volume, workers) -> None:
    directory = volume(21)
    order = [os.path.basename(path) for path in UCVolumeDataset(directory, shuffle=True)]
    loader = DataLoader(UCVolumeDataset(directory, shuffle=True), batch_size=4, num_workers=workers)
    assert names(loader) == order


# --- PyTorch's arguments ---


def test_defaults_are_six_workers_four_batches_ahead_but_no_more_than_make_sense(volume, monkeypatch, caplog) -> None:
    dataset = UCVolumeDataset(volume(12))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    loader = DataLoader(dataset)
    assert (loader.num_workers, loader.prefetch_factor, loader.batch_size) == (6, 4, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with caplog.at_level(logging.INFO, "airdata"):
        assert DataLoader(dataset).num_workers == 2
        assert "2 loader workers instead of 6" in caplog.text
        few = DataLoader(dataset, batch_size=12)
        assert len(list(few)) == 1
    assert few.num_workers == 1
    assert "there are 1 batches" in caplog.text
    assert DataLoader(dataset, num_workers=3).num_workers == 3


def test_no_workers_at_all_works(volume) -> None:
    loader = DataLoader(UCVolumeDataset(volume(7)), batch_size=2, num_workers=0)
    assert [len(batch) for batch in loader] == [2, 2, 2, 1]
    assert loader.prefetch_factor is None


def test_drop_last_drops_on_every_rank_alike(volume) -> None:
    directory = volume(11)
    for rank in range(2):
        loader = DataLoader(
            UCVolumeDataset(directory, rank=rank, world_size=2), batch_size=2, num_workers=2, drop_last=True
        )
        assert [len(batch) for batch in loader] == [2, 2]
        assert len(loader) == 2


def test_a_collate_function_sees_samples_and_its_batch_arrives(volume) -> None:
    class Seen(NamedTuple):
        count: int
        first: int

    loader = DataLoader(
        Decode(UCVolumeDataset(volume(6))), batch_size=3, num_workers=0, collate_fn=lambda got: Seen(len(got), got[0])
    )
    assert [batch.count for batch in loader] == [3, 3]
    assert loader.collate_fn([1]).count == 1  # what the user gave is what is there


def test_samples_without_batches_arrive_as_they_are(volume) -> None:
    directory = volume(5)
    loader = DataLoader(Decode(UCVolumeDataset(directory)), batch_size=None, num_workers=2)
    assert sorted(loader) == [0, 1, 2, 3, 4]


def test_workers_are_shown_the_users_own_dataset(volume) -> None:
    class Asks(Decode):
        def __iter__(self):
            info = get_worker_info()
            yield from (f"{info.dataset is self} {self.touched}" for _ in self.source)

    def touch(worker: int) -> None:
        get_worker_info().dataset.touched = worker

    loader = DataLoader(Asks(UCVolumeDataset(volume(4))), batch_size=None, num_workers=2, worker_init_fn=touch)
    assert sorted(loader) == ["True 0", "True 0", "True 1", "True 1"]


def test_shuffle_is_pointed_to_where_it_belongs(volume) -> None:
    with pytest.raises(ValueError, match=r"UCVolumeDataset\(\.\.\., shuffle=True"):
        DataLoader(UCVolumeDataset(volume(4)), shuffle=True)


def test_other_datasets_work_as_with_pytorch() -> None:
    loader = DataLoader(list(range(6)), batch_size=2, shuffle=True, num_workers=0)
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(6))
    assert len(loader) == 3
    assert loader.stats().batches == 3
    with pytest.raises(StateError, match="no UCVolumeDataset was found in list"):
        loader.state_dict()


def test_both_are_checkpointable(volume) -> None:
    dataset = UCVolumeDataset(volume(4))
    assert isinstance(dataset, Checkpointable)
    assert isinstance(DataLoader(dataset), Checkpointable)
    assert not isinstance(object(), Checkpointable)


# --- epochs ---


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_persistent_workers_hear_of_epochs_and_positions(program, finish, volume, method) -> None:
    directory = volume(17)
    code = """
        import json, os, sys
        from torch.utils.data import IterableDataset
        from airdata import DataLoader, UCVolumeDataset

        class Decode(IterableDataset):
            def __init__(self, source):
                self.source = source
            def __iter__(self):
                for path in self.source:
                    yield int(os.path.basename(path)[4:9])

        if __name__ == "__main__":
            dataset = UCVolumeDataset(sys.argv[1], shuffle=True, seed=5)
            next(iter(dataset))  # the parent has used the transport already
            loader = DataLoader(
                Decode(dataset), batch_size=3, num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[2]
            )
            read = lambda: [number for batch in loader for number in batch.tolist()]
            told = []
            for epoch in (0, 1, 0):
                loader.set_epoch(epoch)
                told.append(read())
            untold = [read(), read()]
            loader.load_state_dict({**loader.state_dict(), "epoch": 1, "samples_served": 7})
            rest = [read(), read()]
            iterator = iter(loader)
            next(iterator)
            after_break = read()
            print(json.dumps([told, untold, rest, after_break]))
    """
    told, untold, rest, after_break = json.loads(finish(program(code, directory, method)))
    expected = UCVolumeDataset(directory, shuffle=True, seed=5)
    orders = [[int(os.path.basename(path)[4:9]) for path in expected] for _ in range(4)]
    assert told == [orders[0], orders[1], orders[0]]
    assert untold == [orders[1], orders[2]]
    assert rest == [orders[1][7:], orders[2]]
    assert after_break == orders[3]


def test_an_iteration_left_early_begins_anew_in_the_same_epoch(volume) -> None:
    loader = DataLoader(UCVolumeDataset(volume(10), shuffle=True), batch_size=2, num_workers=1)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert loader.state_dict()["samples_served"] == 4
    assert len(names(loader)) == 10
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples_served"]) == (1, 0)


# --- trouble ---


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_worker_comes_through_with_the_files_name(volume, workers) -> None:
    directory = volume(8)
    dataset = UCVolumeDataset(directory)
    gone = dataset.manifest[5].path
    os.unlink(os.path.join(directory, gone))
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    with pytest.raises(FetchError, match=gone):
        list(loader)
    assert loader.state_dict()["samples_served"] == 4


def test_bad_files_of_all_workers_together_are_limited(volume) -> None:
    directory = volume(12)
    dataset = UCVolumeDataset(directory, on_error="replace", max_bad_files=1)
    for row in (0, 1):  # one for each worker
        os.unlink(os.path.join(directory, dataset.manifest[row].path))
    with pytest.raises(BadFilesError, match="max_bad_files=1"):
        list(DataLoader(dataset, batch_size=1, num_workers=2))


def test_loaders_closed_early_leave_no_thread_process_or_descriptor(volume) -> None:
    directory = volume(30)
    me = psutil.Process()

    def open_and_leave() -> None:
        loader = DataLoader(UCVolumeDataset(directory), batch_size=2, num_workers=2)
        for batch in loader:
            assert batch
            break
        del batch, loader
        gc.collect()

    def held() -> tuple[int, int, int]:
        return threading.active_count(), len(me.children(recursive=True)), me.num_fds()

    open_and_leave()  # whatever is opened once for all
    before = held()
    for _ in range(5):
        open_and_leave()
    deadline = time.monotonic() + 30  # the threads that feed the queues end by themselves
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, (before, held(), threading.enumerate())
        time.sleep(0.05)


def test_two_iterators_of_one_loader_do_not_disturb_each_other(volume) -> None:
    loader = DataLoader(UCVolumeDataset(volume(9), shuffle=True), batch_size=2, num_workers=1)
    first, second = iter(loader), iter(loader)
    together = list(zip(first, second, strict=True))
    assert all(a == b for a, b in together)
    assert len(together) == 5


# --- what is kept readable, and counted ---


def test_paths_open_in_the_training_loop_however_far_workers_are_ahead(make_files, counting_server, tmp_path) -> None:
    contents = make_files(tmp_path / "served", 60)
    server = counting_server(tmp_path / "served")
    manifest = Manifest.from_paths(contents, sizes=[len(content) for content in contents.values()])
    dataset = UCVolumeDataset(server.url, manifest=manifest, cache_bytes=500)  # room for a few files only
    read = []
    for batch in DataLoader(dataset, batch_size=3, num_workers=2, prefetch_factor=2, persistent_workers=True):
        read += [Path(path).read_bytes() for path in batch]
    assert sorted(read) == sorted(contents.values())


def test_a_worker_that_has_read_everything_stays_until_its_paths_are_done_with(
    make_files, counting_server, tmp_path, program, finish
) -> None:
    contents = make_files(tmp_path / "served", 24)
    server = counting_server(tmp_path / "served")
    manifest = Manifest.from_paths(contents, sizes=[len(content) for content in contents.values()])
    gate, cache = tmp_path / "gate", tmp_path / "cache"
    workers: list[int] = []

    class Gated(IterableDataset):
        def __init__(self, source) -> None:
            self.source = source

        def __iter__(self):
            deadline = time.monotonic() + 60
            while get_worker_info().id == 1 and not gate.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield from self.source

    def sweep_then_open_the_gate() -> None:
        # Were worker 0 to end early, it would do so now: its batches and its end have all been received.
        with contextlib.suppress(psutil.TimeoutExpired):
            psutil.Process(workers[0]).wait(2)
        code = "import sys; from airdata import *; next(iter(UCVolumeDataset(sys.argv[1], cache_dir=sys.argv[2], "
        code += "manifest=Manifest.from_paths([sys.argv[3]]))))"
        finish(program(code, server.url, cache, next(iter(contents))))
        gate.touch()

    dataset = UCVolumeDataset(server.url, manifest=manifest, cache_dir=cache, cache_bytes=0)
    loader = DataLoader(Gated(dataset), batch_size=3, num_workers=2, prefetch_factor=8)
    iterator = iter(loader)
    workers += [worker.pid for worker in iterator._inner._workers]
    read = [Path(path).read_bytes() for path in next(iterator)]
    sweeper = threading.Thread(target=sweep_then_open_the_gate)
    sweeper.start()
    for batch in iterator:
        read += [Path(path).read_bytes() for path in batch]
    sweeper.join()
    assert sorted(read) == sorted(contents.values())
    assert not psutil.pid_exists(workers[0])


def test_stats_count_batches_files_and_waiting(make_files, counting_server, tmp_path) -> None:
    contents = make_files(tmp_path / "served", 12)
    server = counting_server(tmp_path / "served")
    manifest = Manifest.from_paths(contents, sizes=[len(content) for content in contents.values()])
    loader = DataLoader(UCVolumeDataset(server.url, manifest=manifest), batch_size=3, num_workers=2)
    for _ in range(2):
        list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.files.files, stats.files.misses, stats.files.hits) == (8, 24, 12, 12)
    assert stats.files.bytes_fetched == sum(map(len, contents.values()))
    assert stats.fetch_seconds > 0
    assert 0 <= stats.waiting_share <= 1
    assert "8 batches" in repr(stats)


def test_the_time_to_each_batch_goes_to_the_active_mlflow_run(program, finish, volume) -> None:
    code = """
        import sys, mlflow
        from airdata import DataLoader, UCVolumeDataset
        with mlflow.start_run() as run:
            loader = DataLoader(UCVolumeDataset(sys.argv[1]), batch_size=2, num_workers=0)
            for batch in loader:
                pass
            loader._reporter.close(60)
        metrics = mlflow.get_run(run.info.run_id).data.metrics
        print(sorted(metrics), metrics["fetch_seconds"] > 0)
    """
    counts = "'fetch_bad_files', 'fetch_bytes', 'fetch_files', 'fetch_hits', 'fetch_retries'"
    assert finish(program(code, volume(6))).split("\n")[-2] == f"[{counts}, 'fetch_seconds', 'waiting_share'] True"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to pin memory for")
def test_pinned_memory_survives_the_parcel(volume) -> None:
    loader = DataLoader(Decode(UCVolumeDataset(volume(6))), batch_size=2, num_workers=1, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)


def test_the_parcel_passes_through_pytorchs_pinning_of_nested_batches() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    from airdata.metrics import Counters
    from airdata.state import Place, Report
    from airdata.tracked import Parcel

    class Pins:
        def pin_memory(self):
            return "pinned"

    parcel = Parcel({"image": Pins(), "list": [Pins()]}, Report(1, [Place(0, 5, 2)]), [Counters(files=3)])
    assert pin_memory(parcel) == Parcel({"image": "pinned", "list": ["pinned"]}, parcel.report, parcel.counters)


def test_len_is_said_without_pytorchs_warning(volume) -> None:
    loader = DataLoader(UCVolumeDataset(volume(10)), batch_size=3, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        assert len(loader) == 4
        assert len(list(loader)) == 4
