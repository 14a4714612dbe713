"""shuffle_scope="group": each file belongs to one node for good, and all else is as ever."""

from __future__ import annotations

import itertools
import logging
import os
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airdata import DataLoader, Manifest, UCVolumeDataset
from airdata import order as order_module
from airdata.errors import StateError, TopologyError
from airdata.order import EpochOrder
from airdata.schedule import UNEVEN, Schedule
from airdata.topology import Topology

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*ranks get one batch less")


def loader_batches(schedule: Schedule, rank: int, workers: int) -> list[list[int]]:
    """The batches a training loop gets: each worker's stream cut into batches, one worker after the other."""
    size, streams = schedule.batch_size, []
    for worker in range(workers):
        stream = [p for block in schedule.positions(rank, worker, workers) for p in block.tolist()]
        assert len(stream) == schedule.length(rank, worker, workers)
        streams.append([stream[at : at + size] for at in range(0, len(stream), size)])
    return [batch for turn in itertools.zip_longest(*streams) for batch in turn if batch is not None]


def steps_of(schedule: Schedule, workers: int = 1) -> list[list[list[int]]]:
    """For each step, the batch of each rank."""
    ranks = [loader_batches(schedule, rank, workers) for rank in range(schedule.world_size)]
    for rank, batches in enumerate(ranks):
        assert schedule.batches(rank) == len(batches)
    return [list(step) for step in itertools.zip_longest(*ranks, fillvalue=[])]


# --- who reads which positions ---


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
def test_every_topology_covers_the_epoch_and_each_node_reads_its_own_positions(nodes, ranks, uneven) -> None:
    world = nodes * ranks
    for n, start, workers, batch in itertools.product(range(31), (0, 1, 5), (1, 2, 3), (1, 2, 3)):
        if start > n:
            continue
        schedule = Schedule(n, start, world, batch, uneven, nodes)
        steps = steps_of(schedule, workers)
        served = [p for step in steps for got in step for p in got]
        rest = n - start
        whole = rest - rest % (world * batch)
        if uneven == "keep":
            assert sorted(served) == list(range(start, n))
        elif uneven == "drop":
            assert sorted(served) == list(range(start, start + whole))
        else:
            assert set(served) >= set(range(start, n))
            assert len(served) - rest < world * batch
        if uneven != "keep":
            assert {len(got) for step in steps for got in step} <= {batch}
        assert schedule.same_batches == all(all(step) for step in steps)
        for number, step in enumerate(steps):
            first = start + number * world * batch
            if number < rest // (world * batch):  # what is read in a step does not depend on who reads it
                assert sorted(p for got in step for p in got) == list(range(first, first + world * batch))
            for rank, got in enumerate(step):
                if n >= nodes:
                    assert {p % nodes for p in got} <= {rank // ranks}
            sizes = [len(got) for got in step]
            assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200)
@given(
    n=st.integers(0, 300),
    segments=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 5)),
        min_size=1,
        max_size=6,
    ),
)
def test_restarts_on_any_number_of_nodes_serve_every_position_once(n, segments) -> None:
    start, served = 0, []
    for nodes, ranks, workers, batch, steps in segments:
        schedule = Schedule(n, start, nodes * ranks, batch, "keep", nodes)
        served += [p for step in steps_of(schedule, workers)[:steps] for got in step for p in got]
        start = schedule.served(steps)
        assert sorted(served) == list(range(start))
    nodes, ranks, workers, batch, _ = segments[0]
    rest = steps_of(Schedule(n, start, nodes * ranks, batch, "keep", nodes), workers)
    assert sorted(p for step in rest for got in step for p in got) == list(range(start, n))


@given(
    n=st.integers(0, 200),
    topology=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
    uneven=st.sampled_from(UNEVEN),
    data=st.data(),
)
def test_a_worker_that_starts_late_reads_what_it_would_have_read_anyway(n, topology, uneven, data) -> None:
    nodes, ranks, workers, batch = topology
    schedule = Schedule(n, data.draw(st.integers(0, n)), nodes * ranks, batch, uneven, nodes)
    rank, worker = data.draw(st.integers(0, nodes * ranks - 1)), data.draw(st.integers(0, workers - 1))

    def reads(passed: int) -> list[int]:
        return [p for block in schedule.positions(rank, worker, workers, passed) for p in block.tolist()]

    passed = data.draw(st.integers(0, len(reads(0))))
    assert reads(passed) == reads(0)[passed:]


# --- which files those are ---


def groups_of(order: EpochOrder, groups: int) -> dict[int, set[int]]:
    rows = order[np.arange(len(order))].tolist()
    found = defaultdict(set)
    for position, row in enumerate(rows):
        found[position % groups].add(row)
    return found


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["mapped one by one", "sorted"])
@settings(max_examples=40)
@given(n=st.integers(0, 300), groups=st.integers(1, 9), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_the_files_of_a_group_are_the_same_in_every_epoch_and_run_and_come_in_another_order(
    limit, n, groups, seed, epoch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "SORTED_UP_TO", limit)
        order = EpochOrder(seed, epoch, n, shuffle=True, groups=groups)
        positions = np.arange(n)
        assert sorted(order[positions].tolist()) == list(range(n))
        assert [int(order[positions[at : at + 1]][0]) for at in range(0, n, 37)] == order[positions][::37].tolist()
        if groups > 1:  # one group is no groups: all files are shuffled together
            assert groups_of(order, groups) == groups_of(EpochOrder(1, 1, n, shuffle=True, groups=groups), groups)
        if n >= 40 * groups:
            other = EpochOrder(seed, epoch + 1, n, shuffle=True, groups=groups)[positions].tolist()
            assert order[positions].tolist() != other


def test_groups_are_shuffled_independently_of_each_other() -> None:
    n, groups = (1 << 21) + 1, 3
    slots = EpochOrder(0, 0, n, shuffle=True, groups=groups)._mapped(np.arange(600))
    assert (slots % groups == np.arange(600) % groups).all()
    turns = slots // groups
    assert not (turns[0::groups] == turns[1::groups]).any()


def test_neighbours_in_the_manifest_are_spread_over_the_groups() -> None:
    groups = groups_of(EpochOrder(0, 0, 4000, shuffle=True, groups=2), 2)
    assert 800 < sum(row % 2 for row in groups[0]) < 1200
    assert 800 < sum(row < 2000 for row in groups[0]) < 1200


def test_within_a_group_every_order_is_about_as_likely() -> None:
    seen = defaultdict(int)
    for seed in range(2400):
        rows = EpochOrder(seed, 0, 8, shuffle=True, groups=2)[np.arange(0, 8, 2)].tolist()
        seen[tuple(rows)] += 1
    assert len(seen) == 24
    # Chi-square with 23 degrees of freedom: 49.7 is passed once in a thousand, and the seeds are fixed.
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 49.7


# --- nodes, found ---


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, 1),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "8"}, 8),
        # dealt round robin over the nodes; and more ranks on some nodes than on others
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}, None),
        ({"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, None),
    ],
)
def test_nodes_are_found_where_their_ranks_stand_in_a_row(environ, nodes) -> None:
    topology = Topology.current(environ=environ)
    if nodes is None:
        with pytest.raises(TopologyError, match='shuffle_scope="global"'):
            topology.even_nodes()
    else:
        assert topology.even_nodes() == nodes


def test_nodes_can_be_said_and_ranks_that_a_user_numbers_lie_on_those_of_the_launcher() -> None:
    assert Topology.current(3, 8, 2, environ={}).even_nodes() == 2
    launched = {"RANK": "12", "WORLD_SIZE": "16", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}
    assert (
        Topology.current(3, 4, environ=launched).even_nodes() == 2
    )  # data-parallel ranks, four of the launcher's each
    with pytest.raises(TopologyError, match="nodes=3"):
        Topology.current(0, 8, 3)


# --- datasets ---


def names(samples) -> list[str]:
    return [os.path.basename(sample) for sample in samples]


def batches_of(directory: str, world: int, workers: int = 0, batch: int = 2, state: dict | None = None, **options):
    """What each rank's loader gives, and the states after it."""
    got, states = [], []
    for rank in range(world):
        source = UCVolumeDataset(directory, shuffle=True, shuffle_scope="group", rank=rank, world_size=world, **options)
        loader = DataLoader(source, batch_size=batch, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        got.append([names(paths) for paths in loader])
        states.append(loader.state_dict())
    return got, states


@pytest.mark.parametrize("workers", [0, 2])
def test_each_node_reads_the_same_files_in_every_epoch(volume, workers) -> None:
    directory = volume(23)
    of_node = defaultdict(list)
    for rank in range(4):
        source = UCVolumeDataset(
            directory, shuffle=True, shuffle_scope="group", rank=rank, world_size=4, nodes=2, seed=3
        )
        loader = DataLoader(source, batch_size=2, num_workers=workers)
        of_node[rank // 2].append([names(paths for got in loader for paths in got) for _ in range(3)])
    sets = [[{name for rank in ranks for name in rank[epoch]} for epoch in range(3)] for ranks in of_node.values()]
    assert sets[0][0] == sets[0][1] == sets[0][2]
    assert sets[1][0] == sets[1][1] == sets[1][2]
    assert len(sets[0][0]) + len(sets[1][0]) == 23
    assert not sets[0][0] & sets[1][0]
    assert of_node[0][0][0] != of_node[0][0][1]


def test_a_node_fetches_nothing_in_the_second_epoch_and_half_of_it_with_the_global_scope(
    make_files, counting_server, tmp_path
) -> None:
    contents = make_files(tmp_path / "served", 40)
    server = counting_server(tmp_path / "served")
    manifest = Manifest.from_paths(contents, sizes=[len(content) for content in contents.values()])
    fetched = {}
    for scope in ("group", "global"):
        epochs = []
        nodes = [
            UCVolumeDataset(
                server.url, manifest=manifest, shuffle=True, shuffle_scope=scope, rank=node, world_size=2,
                cache_dir=tmp_path / f"{scope}{node}", seed=1,
            )
            for node in range(2)
        ]  # fmt: skip
        for _ in range(2):
            before = sum(server.gets.values())
            assert sum(len(list(node)) for node in nodes) == 40
            epochs.append(sum(server.gets.values()) - before)
        fetched[scope] = epochs
    assert fetched["group"] == [40, 0]
    assert fetched["global"][0] == 40
    assert 8 < fetched["global"][1] < 32  # half of them, give or take


def test_warming_fetches_what_the_node_will_read(make_files, counting_server, tmp_path) -> None:
    contents = make_files(tmp_path / "served", 21)
    server = counting_server(tmp_path / "served")
    manifest = Manifest.from_paths(contents, sizes=[len(content) for content in contents.values()])
    options = {"manifest": manifest, "shuffle": True, "shuffle_scope": "group", "world_size": 2}
    for node in range(2):
        dataset = UCVolumeDataset(server.url, rank=node, cache_dir=tmp_path / f"{node}", **options)
        assert dataset.warm(progress=False).files == len(dataset)
        before = sum(server.gets.values())
        assert len(list(dataset)) == (11, 10)[node]
        assert sum(server.gets.values()) == before
    assert server.gets == dict.fromkeys(contents, 1)


def test_a_run_goes_on_over_other_nodes_with_the_groups_of_the_first(volume) -> None:
    directory = volume(37)
    served, state = [], None
    for world, nodes, steps in ((4, 4, 1), (2, 1, 3), (4, 2, 1), (3, 3, 1)):
        shares, states = [], []
        for rank in range(world):
            source = UCVolumeDataset(
                directory, shuffle=True, shuffle_scope="group", seed=5, rank=rank, world_size=world, nodes=nodes
            )
            loader = DataLoader(source, batch_size=2, num_workers=0)
            if state is not None:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
            shares.append([names(got) for got in itertools.islice(iter(loader), steps)])
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
        assert state["groups"] == 4
        served += [name for step in zip(*shares, strict=True) for got in step for name in got]
    assert state["samples_served"] == len(served) == len(set(served)) == 8 + 12 + 8 + 6
    whole = UCVolumeDataset(directory, shuffle=True, shuffle_scope="group", groups=4, seed=5)
    assert set(served) == set(names(whole)[: len(served)])


def test_the_groups_of_a_run_stay_when_its_nodes_change(volume, monkeypatch) -> None:
    dataset = UCVolumeDataset(volume(12), shuffle=True, shuffle_scope="group")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    first = names(dataset)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert dataset.state_dict()["groups"] == 3
    dataset.set_epoch(0)
    assert names(dataset)[::3] == first


def test_the_order_of_fresh_runs_is_the_same_on_any_number_of_nodes_when_groups_are_said(volume) -> None:
    directory = volume(24)
    expected = names(UCVolumeDataset(directory, shuffle=True, shuffle_scope="group", groups=6, seed=2))
    for nodes, ranks in ((1, 2), (2, 1), (2, 2), (3, 1), (6, 1)):
        world = nodes * ranks
        batch = 12 // world
        got, states = batches_of(directory, world, batch=batch, groups=6, nodes=nodes, seed=2)
        for step, batches in enumerate(zip(*got, strict=True)):
            assert sorted(name for names in batches for name in names) == sorted(expected[12 * step : 12 * step + 12])
        assert {one["groups"] for one in states} == {6}


def test_states_of_other_groups_are_refused_and_a_poor_fit_is_logged(volume, caplog) -> None:
    directory = volume(12)
    state = UCVolumeDataset(directory, shuffle=True, shuffle_scope="group", groups=4).state_dict()
    for options in ({"shuffle_scope": "group", "groups": 2}, {}):
        with pytest.raises(StateError, match="groups was 4 and is"):
            UCVolumeDataset(directory, shuffle=True, **options).load_state_dict(state)
    dataset = UCVolumeDataset(directory, shuffle=True, shuffle_scope="group", rank=0, world_size=3)
    dataset.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "airdata"):
        list(dataset)
    assert "dealt to 4 groups, which 3 nodes cannot share out" in caplog.text


def test_uneven_nodes_are_an_error_before_any_sample(volume, monkeypatch) -> None:
    for name, value in {"RANK": 4, "WORLD_SIZE": 5, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    directory = volume(12)
    with pytest.raises(TopologyError, match="do not have equally many ranks"):
        iter(UCVolumeDataset(directory, shuffle=True, shuffle_scope="group"))
    assert list(UCVolumeDataset(directory, shuffle=True))


def test_padding_repeats_files_of_the_same_node(volume) -> None:
    got, _ = batches_of(volume(11), 4, batch=2, uneven="pad", nodes=2)
    assert [[len(batch) for batch in rank] for rank in got] == [[2, 2]] * 4
    nodes = [{name for rank in got[at : at + 2] for batch in rank for name in batch} for at in (0, 2)]
    assert not nodes[0] & nodes[1]
    assert len(nodes[0] | nodes[1]) == 11
