"""Ranks of a job are killed while they save together; the next job, of any size, finds the newest save whole."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import checkpoint_ranks as jobs
import pytest

from airdata.checkpoint import CheckpointManager, layout
from airdata.transport import open_transport

pytestmark = [
    pytest.mark.filterwarnings("ignore:checkpoints under"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def ranks():
    server = jobs.RankServer()
    yield server
    server.close()


class Soak:
    """Job after job on one root, each killed while it saves; knows what a restore may give."""

    def __init__(self, ranks, folder, root, options, seed):
        self.ranks, self.folder, self.root, self.options = ranks, folder, str(root), options
        self.dice = random.Random(seed)
        self.begun = {}  # by the number of the save: its step
        self.saved = 0  # the last save of which any rank heard that it is there
        self.span = 0.1  # seconds that a save takes
        self.newest = 0  # step that is published
        self.litter = set()
        self.count = {"jobs": 0, "survivors": 0, "published unheard": 0, "left files": 0}

    def start(self, world, **settings):
        """A new job."""
        self.count["jobs"] += 1
        meet = str(self.folder / f"meet{self.count['jobs']}")
        value = max(self.begun, default=0) + 1
        self.ranks.start(jobs.Job(self.root, meet, world, value, options=self.options, **settings))

    def check_restored(self, world):
        """Every rank has restored the newest save, to the bit, which it checks itself."""
        self.ranks.wait_for_all("restored", range(world))
        restored = {tuple(map(int, words)) for words in self.ranks.words("restored").values()}
        assert len(restored) == 1, restored
        [(step, value)] = restored
        assert value >= self.saved
        assert value == 0 or self.begun[value] == step
        assert step == self.newest
        self.count["published unheard"] += value > self.saved

    def kill_while_it_restores(self, world):
        self.ranks.wait_for_all("joined", range(world))
        time.sleep(self.dice.random() * self.span)
        self.kill(world)

    def kill_while_it_saves(self, world):
        self.check_restored(world)
        for _ in range(self.dice.randrange(3)):
            began = time.monotonic()
            self.ranks.wait_for("saved", rank=0)
            self.span = 0.7 * self.span + 0.3 * (time.monotonic() - began)
        time.sleep(self.dice.random() * 1.2 * self.span)  # the moment of the kill
        self.kill(world)

    def kill(self, world):
        """Kill some ranks, or all; the others fail in words of ours, and end."""
        everyone = range(world)
        some = self.dice.sample(everyone, self.dice.randint(1, world))
        victims = self.dice.choice([[0], everyone, some, *([rank] for rank in everyone)])
        self.ranks.kill(victims)
        codes = [int(code) for code in self.ranks.wait_for("ended")]
        assert codes == [-9 if rank in victims else jobs.FAILED for rank in everyone], self.ranks.said[-10:]
        failures = self.ranks.words("failed")
        for rank in set(everyone) - set(victims):
            assert re.search(r"lost touch|failed on rank", " ".join(failures[rank])), failures[rank]
            self.count["survivors"] += 1
        self.look()

    def look(self):
        """Everything published is whole, and what else is there is of the kind that goes by itself."""
        for _, what, words in self.ranks.said:
            if what == "begins":
                self.begun[int(words[1])] = int(words[0])
            if what == "saved":
                self.saved = max(self.saved, int(words[1]))
        manager = CheckpointManager(self.root, storage_options=self.options)
        owned = set()
        steps = manager.steps()
        self.newest = max(steps, default=0)
        for step in steps:
            manager.verify(step)
            folder = layout.step_name(step)
            published = layout.read_published(open_transport(manager.root.child(folder)))
            owned |= {f"{folder}/{name}" for name in (layout.METADATA, *published.owned())}
        litter = {file for file in open_transport(manager.root).list() if file.path not in owned}
        assert [file.path for file in litter if not layout.is_leftover(file.path.partition("/")[2])] == []
        self.count["left files"] += bool({file.path for file in litter} - self.litter)
        self.litter = {file.path for file in litter}

    def grow_old(self):
        """What the kills left was left long ago."""
        for name in self.litter:
            path = Path(self.root, name)
            save_id = layout.shard_save_id(path.name)
            os.utime(path, (1e9, 1e9))
            if save_id:
                path.rename(path.with_name(path.name.replace(save_id[:16], "20200101T000000Z")))
        for folder in Path(self.root).iterdir():
            os.utime(folder, (1e9, 1e9))

    def run(self, kills):
        for _ in range(kills):
            world = self.dice.choice([1, 2, 2, 3, 3])
            self.start(world, again=self.dice.random() < 0.5, asynchronous=self.dice.random() < 0.3)
            if self.dice.random() < 0.1:
                self.kill_while_it_restores(world)
            else:
                self.kill_while_it_saves(world)
        self.start(2, saves=1)
        self.check_restored(2)
        assert self.ranks.wait_for("ended") == ["0", "0"]
        self.look()
        if not self.options:
            self.grow_old()
            self.start(1, saves=3)
            assert self.ranks.wait_for("ended") == ["0"]
            self.look()
            assert self.litter == set()
            assert len(os.listdir(self.root)) == 2  # steps
        print(self.count)  # for a person, with -s
        assert self.saved, "no save came through at all: the test proves nothing"


@pytest.mark.timeout(600)
def test_kills_of_any_ranks_during_a_save_never_harm_what_is_published(ranks, tmp_path):
    Soak(ranks, tmp_path, tmp_path / "steps", {}, seed=os.getpid()).run(6)


@pytest.mark.timeout(400)
def test_ranks_give_up_on_a_killed_one_though_the_others_stay_alive(ranks, tmp_path):
    ranks.start(jobs.Job(str(tmp_path / "steps"), str(tmp_path / "meet"), 3, value=1, linger=True, timeout=8))
    ranks.wait_for("saved", rank=0)
    ranks.kill([2])
    ranks.wait_for_all("failed", (0, 1))
    for words in ranks.words("failed").values():
        assert words[0] == "CheckpointError"
        assert "lost touch with the others; one of them has ended, or did not answer within 8 s" in " ".join(words)
    manager = CheckpointManager(tmp_path / "steps")
    assert manager.steps()
    for step in manager.steps():
        manager.verify(step)


@pytest.mark.timeout(400)
def test_a_rank_that_hears_nothing_leaves_what_the_coordinator_may_yet_publish(ranks, tmp_path, s3_proxy, s3_volume):
    options = {**s3_volume.storage_options, "endpoint_url": s3_proxy.url}
    s3_proxy.set_faults({"method": "PUT", "match": "/.metadata", "latency": 4})
    ranks.start(jobs.Job(s3_volume.url, str(tmp_path / "meet"), 4, value=1, saves=1, options=options))
    ranks.wait_for("begins", rank=0)
    deadline = time.monotonic() + 100
    while not s3_proxy.requests("PUT", "/.metadata"):
        assert time.monotonic() < deadline
    ranks.kill([1, 2])  # of whom rank 3 hears one, and not rank 0: gloo broadcasts along a tree
    ranks.wait_for("failed", rank=3)
    ranks.wait_for("ended")
    manager = CheckpointManager(s3_volume.url, storage_options=s3_volume.storage_options)
    assert manager.steps() == [1]
    manager.verify(1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_and_fifty_kills_of_ranks(ranks, tmp_path):
    Soak(ranks, tmp_path, tmp_path / "steps", {}, seed=5).run(150)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_of_ranks_that_save_to_a_bucket(ranks, s3_volume, tmp_path):
    Soak(ranks, tmp_path, s3_volume.url, dict(s3_volume.storage_options), seed=6).run(50)
