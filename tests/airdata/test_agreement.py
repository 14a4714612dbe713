"""Ranks that disagree find out before the first sample, with real ranks and stores."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from airdata.agreement import agree, compare
from airdata.errors import TopologyError


def check_all(
    facts: list[dict], store=None, turns: int = 1, timeout: float = 60, absent: tuple[int, ...] = ()
) -> list[str]:
    """Every rank in a thread of its own; what each raised, or ""."""
    store, raised = store or HashStore(), [""] * len(facts)

    def rank(number: int) -> None:
        try:
            for turn in range(turns):
                agree(store, facts[number], prefix="p/", turn=turn, rank=number, world_size=len(facts), timeout=timeout)
        except TopologyError as error:
            raised[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(facts)) if number not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return raised


def test_ranks_that_agree_go_on_time_after_time() -> None:
    assert check_all([{"seed": 1, "uneven": "keep"}] * 5, turns=20) == [""] * 5


def test_every_rank_gets_the_one_error_that_names_both_sides() -> None:
    errors = check_all([{"num_workers": 4}, {"num_workers": 4}, {"num_workers": 2}])
    assert len(set(errors)) == 1
    assert "num_workers is 4 on rank 0, 1 and 2 on rank 2" in errors[0]


def test_all_differences_are_said_at_once() -> None:
    text = compare([{"seed": 1, "epoch": 0, "batch_size": 8}, {"seed": 2, "epoch": 0, "batch_size": 4}])
    assert "seed is 1 on rank 0 and 2 on rank 1" in text
    assert "batch_size is 8 on rank 0 and 4 on rank 1" in text
    assert "epoch" not in text
    assert compare([{"seed": 1}] * 100) == ""
    assert "and 92 more" in compare([{"seed": 1}] + [{"seed": 2}] * 100)[:400]


def test_a_rank_that_never_iterates_is_named_by_the_others_in_time() -> None:
    errors = check_all([{"seed": 1}] * 3, timeout=1, absent=(1,))
    assert "ranks 1 did not begin" in errors[0]
    assert errors[2] == errors[0]
    assert "rank 2 waited for rank 0" in check_all([{"seed": 1}] * 3, timeout=0.2, absent=(0,))[2]


def test_a_rank_waiting_leaves_the_store_to_others() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    waiting = threading.Thread(
        target=check_all, args=([{"seed": 1}] * 2, PrefixStore("x", store)), kwargs={"timeout": 20, "absent": (1,)}
    )
    waiting.start()
    store.set("heartbeat", "1")
    assert store.get("heartbeat") == b"1"
    assert waiting.is_alive()
    agree(PrefixStore("x", store), {"seed": 1}, prefix="p/", turn=0, rank=1, world_size=2, timeout=60)
    waiting.join(60)
    assert not waiting.is_alive()


# --- real ranks ---

JOB = """
    import datetime, json, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.utils.data import IterableDataset
    from airdata import DataLoader, UCVolumeDataset
    from airdata import agreement
    from airdata.errors import TopologyError

    class Numbers(IterableDataset):
        def __init__(self, source):
            self.source = source
        def __iter__(self):
            for path in self.source:
                yield int(os.path.basename(path)[4:9])

    def main(directory, what):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo")
        options, workers, batch, epoch = {"shuffle": True, "uneven": "drop"}, 1, 2, 0
        if rank == world - 1:
            options["seed"] = 5 if what == "seed" else 0
            workers, batch, epoch = workers + (what == "num_workers"), batch + (what == "batch_size"), int(what == "epoch")
            if what == "the manifest":
                options["pattern"] = "class0/*"
        loader = DataLoader(Numbers(UCVolumeDataset(directory, **options)), batch_size=batch, num_workers=workers)
        loader.set_epoch(epoch)
        if what == "absent":
            agreement.TIMEOUT = 2.0
            if rank == world - 1:
                return [], None
        try:
            got = [[batch.tolist() for batch in loader] for _ in range(2)]
            state = loader.state_dict()
        except TopologyError as error:
            got, state = str(error), None
        return got, state

    def leave():
        # Not by a barrier: a rank that leaves a gloo group can reset the connection of one that is still in it.
        sys.stdout.flush()
        store, world = c10d._get_default_store(), int(os.environ["WORLD_SIZE"])
        store.set("left/" + os.environ["RANK"], "")
        if os.environ["RANK"] == "0":
            store.wait([f"left/{rank}" for rank in range(world)], datetime.timedelta(seconds=120))
        os._exit(0)

    if __name__ == "__main__":
        print(json.dumps(main(*sys.argv[1:])))
        leave()
"""


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_of_a_real_job_cover_each_epoch_once(ranks, volume, world) -> None:
    from airdata import UCVolumeDataset

    directory = volume(17)
    printed = [json.loads(output) for output in ranks(JOB, world, directory, "nothing")]
    expected = UCVolumeDataset(directory, shuffle=True)
    for epoch in range(2):
        order = [int(os.path.basename(path)[4:9]) for path in expected]
        steps = zip(*(got[epoch] for got, _ in printed), strict=True)
        assert [x for step in steps for batch in step for x in batch] == order[: 17 - 17 % (2 * world)]
    assert all(state == printed[0][1] for _, state in printed)
    assert printed[0][1]["epoch"] == 2


@pytest.mark.parametrize("what", ["num_workers", "the manifest"])
def test_ranks_of_a_real_job_that_disagree_get_one_error_before_any_sample(ranks, volume, what) -> None:
    errors = [json.loads(output)[0] for output in ranks(JOB, 2, volume(12), what)]
    assert errors[0] == errors[1]
    assert f"{what} is " in errors[0]
    assert "on rank 0 and " in errors[0]


def test_a_rank_of_a_real_job_that_never_iterates_hangs_nobody(ranks, volume) -> None:
    first, second = (json.loads(output)[0] for output in ranks(JOB, 2, volume(12), "absent"))
    assert "ranks 1 did not begin to iterate" in first
    assert second == []
