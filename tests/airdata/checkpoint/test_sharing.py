import itertools
import os
import textwrap
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import LoadPlan

from airdata.checkpoint import UCVolumeWriter
from airdata.checkpoint.jobs import in_turn
from airdata.checkpoint.sharing import (
    Offer,
    Share,
    SharedSource,
    bridge,
    intersect,
    merge,
    offer,
    overlaps,
    share_out,
)
from airdata.errors import CorruptCheckpointError

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=6)


def bytes_of(parts):
    return {at for start, end in parts for at in range(start, end)}


@given(ranges)
def test_merged_ranges_hold_the_same_bytes_and_lie_apart(parts):
    merged = merge(parts).tolist()
    assert bytes_of(merged) == bytes_of(parts)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(ranges, ranges)
def test_an_intersection_holds_the_bytes_of_both(left, right):
    assert bytes_of(intersect(merge(left), merge(right)).tolist()) == bytes_of(left) & bytes_of(right)


@given(st.lists(ranges, min_size=1, max_size=5), st.integers(1, 20))
def test_pieces_are_what_several_ranks_need_and_hold_nothing_that_nobody_wants(wants, piece):
    merged = [{"f": merge(want)} for want in wants]
    pieces = overlaps(merged, piece, least=1).get("f", np.empty((0, 3), np.int64)).tolist()
    wanted = set().union(*map(bytes_of, wants))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces))
    for start, end, users in pieces:
        assert end - start <= piece
        assert bytes_of([(start, end)]) <= wanted
        assert users == sum(bool(bytes_of([(start, end)]) & bytes_of(want)) for want in wants) > 1
    counts = Counter(at for want in wants for at in bytes_of(want))
    assert bytes_of([each[:2] for each in pieces]) >= {at for at, count in counts.items() if count > 1}


def test_short_stretches_are_not_worth_sharing():
    wants = [{"f": merge([(0, 100)]), "g": merge([(0, 700)])}, {"f": merge([(90, 700)]), "g": merge([(90, 700)])}]
    assert {file: found.tolist() for file, found in overlaps(wants, least=50).items()} == {"g": [[90, 700, 2]]}


def test_rows_of_many_small_tensors_are_bridged_and_those_of_large_ones_are_not():
    megabyte = 1 << 20
    small = merge([(n * 4 * megabyte, (n * 4 + 1) * megabyte) for n in range(10)])
    assert bridge(small).tolist() == [[0, 37 * megabyte]]
    large = merge([(n * 32 * megabyte, (n * 32 + 8) * megabyte) for n in range(10)])
    assert bridge(large).tolist() == large.tolist()


def plan(node, *reads):
    offered = offer(LoadPlan([]), list(reads))
    return replace(offered, storage_data=Offer(node, offered.storage_data.ranges))


def test_only_ranks_of_one_node_share():
    read = ("f", 0, 4 << 20)
    plans = share_out([plan("a", read), plan("b", read), plan("a", read), LoadPlan([]), plan("c", read)])
    shares = [each.storage_data for each in plans]
    assert [share and (share.place, share.ranks) for share in shares] == [(0, 2), None, (1, 2), None, None]
    assert shares[0].key == shares[2].key
    assert shares[0].pieces["f"].tolist() == [[0, 4 << 20, 2]]


def test_ranks_that_want_nothing_in_common_do_not_share():
    plans = share_out([plan("a", ("f", 0, 4 << 20)), plan("a", ("f", 4 << 20, 8 << 20), ("g", 0, 9 << 20))])
    assert [each.storage_data for each in plans] == [None, None]


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 5))
def test_every_rank_runs_every_job_and_begins_where_no_other_does(count, ranks, threads):
    jobs = list(range(count))
    orders = [in_turn(jobs, place, ranks, threads) for place in range(ranks)]
    assert all(sorted(order) == jobs for order in orders)
    if count >= ranks * threads:
        assert len({order[0] for order in orders}) == ranks


# --- the source ------------------------------------------------------------------------------------------------------


class Disk:
    """A file of known bytes, which counts how often each is read."""

    def __init__(self, size):
        self.content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self.reads = np.zeros(size, np.uint8)
        self.lock = threading.Lock()

    def read_into(self, name, start, views):
        for view in views:
            view[:] = self.content[start : start + len(view)]
            with self.lock:
                self.reads[start : start + len(view)] += 1
            start += len(view)


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def read(source, start, end):
    # In odd parts, as tensors and the gaps between them are.
    buffer = np.zeros(end - start, np.uint8)
    cuts = [0, (end - start) // 3, (end - start) // 3, end - start]
    source.read_into("f", start, [buffer[a:b] for a, b in itertools.pairwise(cuts)])
    return buffer


def load(disk, share, reads):
    source = SharedSource(disk, share, [("f", *each) for each in reads])
    try:
        for start, end in reads:
            assert np.array_equal(read(source, start, end), disk.content[start:end])
    finally:
        source.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(ranges, min_size=2, max_size=4), st.integers(1, 30))
def test_ranks_that_load_together_get_the_right_bytes_however_often_they_ask(wants, piece):
    disk = Disk(100)
    pieces = overlaps([{"f": merge(want)} for want in wants], piece, least=1)
    share = Share(os.urandom(8).hex(), 0, len(wants), pieces)
    sources = [SharedSource(disk, share, [("f", *each) for each in want]) for want in wants]
    threads = [
        threading.Thread(target=lambda s=source, w=want: [read(s, *each) for each in w])
        for source, want in zip(sources, wants, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for source, want in zip(sources, wants, strict=True):
        for each in want:  # again, when pieces may be gone
            assert np.array_equal(read(source, *each), disk.content[each[0] : each[1]])
    for source in sources:
        source.close()


def test_a_piece_is_fetched_once_and_goes_when_the_last_rank_has_read_it(tmp_path):
    disk = Disk(20 << 20)
    reads = [(0, 9 << 20), (9 << 20, 20 << 20)]  # both need the piece from 8 to 16 MiB
    share = Share("key", 0, 2, overlaps([{"f": merge(reads)}] * 2))
    sources = [SharedSource(disk, share, [("f", *each) for each in reads]) for _ in range(2)]

    def pieces():
        return sorted(path.name for path in tmp_path.rglob("0-*") if path.suffix != ".done")

    for start, end in reads:
        assert np.array_equal(read(sources[0], start, end), disk.content[start:end])
    assert len(pieces()) == 3
    read(sources[1], *reads[0])
    assert pieces() == [f"0-{16 << 20}-{20 << 20}", f"0-{8 << 20}-{16 << 20}"]
    read(sources[1], *reads[1])
    assert pieces() == []
    assert bool((disk.reads == 1).all())
    for source in sources:
        source.close()
    assert not list(tmp_path.rglob("load-*"))


def test_an_error_of_the_fetching_rank_is_its_own_and_the_next_one_fetches():
    disk = Disk(4 << 20)
    share = Share("key", 0, 2, overlaps([{"f": merge([(0, 4 << 20)])}] * 2))

    class Broken:
        def read_into(self, name, start, views):
            raise CorruptCheckpointError(f"{name} is missing")

    broken, sound = (SharedSource(each, share, [("f", 0, 4 << 20)]) for each in (Broken(), disk))
    with pytest.raises(CorruptCheckpointError, match="f is missing"):
        read(broken, 0, 4 << 20)
    assert np.array_equal(read(sound, 0, 4 << 20), disk.content)
    broken.close()
    sound.close()


def test_where_no_folder_can_be_had_every_rank_reads_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    load(Disk(4 << 20), Share("key", 0, 2, overlaps([{"f": merge([(0, 4 << 20)])}] * 2)), [(0, 4 << 20)])


# --- whole loads -------------------------------------------------------------------------------------------------------

COUNTED = """
import fsspec
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
class Counted(LocalFileSystem):
    protocol = "counted"
    data = metadata = 0
    def cat_file(self, path, start=None, end=None, **options):
        found = super().cat_file(path, start=start, end=end, **options)
        if path.endswith(".distcp"):
            Counted.data += len(found)
        else:
            Counted.metadata += 1
        return found
    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.removeprefix("counted://"))
fsspec.register_implementation("counted", Counted, clobber=True)
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_ranks_of_a_node_have_in_common_is_fetched_once(run_ranks, tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {f"t{n}": torch.randn(1000, 1024, generator=generator) for n in range(8)}
    torch.distributed.checkpoint.save(state, storage_writer=UCVolumeWriter(tmp_path / "c"), no_dist=True)
    program = """
        mesh = init_device_mesh("cpu", (world,))
        generator = torch.Generator().manual_seed(0)
        full = {f"t{n}": torch.randn(1000, 1024, generator=generator) for n in range(8)}
        for kind, verify in (Shard(1), "items"), (Shard(1), "off"), (Shard(0), "items"), (Replicate(), "items"), (Shard(0), "files"):
            state = {name: distribute_tensor(torch.zeros_like(t), mesh, [kind]) for name, t in full.items()}
            Counted.data = Counted.metadata = 0
            dcp.load(state, storage_reader=UCVolumeReader("counted://" + root, verify=verify))
            for name, tensor in state.items():
                assert torch.equal(tensor.full_tensor(), full[name]), name
            print(Counted.data, Counted.metadata)
    """
    outputs = run_ranks(4, COUNTED + textwrap.dedent(program), str(tmp_path / "c"))
    loads = np.array([[line.split() for line in output.splitlines()] for output in outputs], np.int64)
    data, metadata = loads[:, :, 0].sum(axis=0), loads[:, :, 1].sum(axis=0)
    size = sum(tensor.numel() * 4 for tensor in state.values())
    assert all(data <= 1.05 * np.array([size, size, size, size, 2 * size]))  # verifying files reads them once before
    assert metadata.tolist() == [2] * 5  # .metadata and the record


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_rank_hears_of_a_file_that_is_damaged_however_the_work_is_shared(run_ranks, tmp_path, shards, flip):
    state = {f"t{n}": torch.ones(50_000) for n in range(8)}
    writer = UCVolumeWriter(tmp_path, file_bytes=1)
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    damaged = shards(tmp_path)[3]
    flip(damaged, 100_000)
    outputs = run_ranks(
        3,
        """
        from torch.distributed.checkpoint.api import CheckpointException
        try:
            dcp.load({f"t{n}": torch.zeros(50_000) for n in range(8)},
                     storage_reader=UCVolumeReader(root, verify="files"))
        except CheckpointException as error:
            print(sorted((rank, type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()))
        """,
        str(tmp_path),
    )
    for output in outputs:
        failures = eval(output)
        assert [failure[:2] for failure in failures] == [(rank, "CorruptCheckpointError") for rank in range(3)]
        assert all(f"{damaged.name} is damaged" in failure[2] for failure in failures)
    assert not list(tmp_path.rglob("load-*"))
