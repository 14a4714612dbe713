import threading

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter
from airdata.checkpoint.layout import read_published
from airdata.errors import CheckpointError, CorruptCheckpointError
from airdata.transport import open_transport
from airdata.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def failure_of(caught):
    [(error, _)] = caught.value.failures.values()
    return error


# --- what it reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "items", "files"])
@pytest.mark.parametrize("place", ["directory", "memory"])
def test_what_was_saved_comes_back_bit_for_bit(verify, place, tmp_path, make_state, assert_same):
    path = tmp_path if place == "directory" else f"memory://reader/{verify}"
    dcp.save(make_state(1), storage_writer=UCVolumeWriter(path))
    loaded = make_state(None)
    dcp.load(loaded, storage_reader=UCVolumeReader(path, verify=verify))
    assert_same(loaded, make_state(1))


@pytest.mark.parametrize("verify", ["off", "items", "files"])
def test_stock_checkpoints_are_read(verify, tmp_path, make_state, assert_same):
    dcp.save(make_state(1), storage_writer=FileSystemWriter(tmp_path, thread_count=2))
    loaded = make_state(None)
    dcp.load(loaded, storage_reader=UCVolumeReader(tmp_path, verify=verify))
    assert_same(loaded, make_state(1))
    assert isinstance(UCVolumeReader(tmp_path), FileSystemReader)


def test_stock_checkpoints_in_memory_are_read(make_state, assert_same):
    dcp.save(make_state(1), storage_writer=FsspecWriter("memory://reader/stock"))
    loaded = make_state(None)
    dcp.load(loaded, storage_reader=UCVolumeReader("memory://reader/stock"))
    assert_same(loaded, make_state(1))


def test_destinations_of_another_dtype_or_layout_are_converted(tmp_path):
    saved = torch.randn(40, 30)
    dcp.save({"a": saved, "b": saved, "c": saved}, storage_writer=UCVolumeWriter(tmp_path))
    target = {
        "a": torch.zeros(40, 30, dtype=torch.float64),
        "b": torch.zeros(30, 40).t(),
        "c": torch.zeros(40, 60)[:, ::2],
    }
    dcp.load(target, storage_reader=UCVolumeReader(tmp_path))
    assert torch.equal(target["a"], saved.double())
    assert torch.equal(target["b"], saved)
    assert torch.equal(target["c"], saved)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 2)])
def test_another_world_size_gets_the_same_tensors(run_ranks, tmp_path, before, after):
    program = """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor, Shard, Replicate
        full = {"rows": torch.arange(7000.).view(70, 100), "columns": torch.arange(5000.).view(50, 100),
                "vector": torch.arange(10.), "same": torch.arange(9.)}
        kinds = {"rows": Shard(0), "columns": Shard(1), "vector": Shard(0), "same": Replicate()}
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
        def place(tensor, kind):
            return distribute_tensor(tensor, mesh, [kind]) if world > 1 else tensor.clone()
        if sys.argv[2] == "save":
            dcp.save({k: place(v, kinds[k]) for k, v in full.items()}, storage_writer=UCVolumeWriter(root))
        else:
            state = {k: place(torch.zeros_like(v), kinds[k]) for k, v in full.items()}
            dcp.load(state, storage_reader=UCVolumeReader(root))
            for k, v in state.items():
                assert torch.equal(v.full_tensor() if world > 1 else v, full[k]), k
            print("same")
    """
    run_ranks(before, program, str(tmp_path / "c"), "save")
    assert run_ranks(after, program, str(tmp_path / "c"), "load") == ["same\n"] * after


class CountingStore(MemoryFileSystem):
    """Counts the bytes of data files that are fetched."""

    protocol = "counting"
    fetched = 0
    lock = threading.Lock()

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start=start, end=end, **kwargs)
        if path.endswith(".distcp"):
            with CountingStore.lock:
                CountingStore.fetched += len(data)
        return data


class Slice(DefaultLoadPlanner):
    """Loads a slice of a tensor into a smaller one, as another world size would."""

    def __init__(self, *offsets):
        super().__init__()
        self.offsets = offsets

    def create_local_plan(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        items = []
        for name, tensor in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[name]
            chunk = ChunkStorageMetadata(torch.Size(self.offsets), tensor.size())
            items += create_read_items_for_chunk_list(name, entry, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn]


@pytest.fixture
def counting():
    fsspec.register_implementation("counting", CountingStore, clobber=True)
    return CountingStore


def test_scattered_tensors_cost_what_they_weigh(counting):
    state = {f"t{n:02}": torch.full((256, 1024), float(n)) for n in range(64)}
    dcp.save(state, storage_writer=UCVolumeWriter("counting://scattered"))
    wanted = {f"t{n:02}": torch.zeros(256, 1024) for n in (50, 3, 20, 61, 21, 8, 33, 40)}
    counting.fetched = 0
    dcp.load(wanted, storage_reader=UCVolumeReader("counting://scattered"))
    assert all(bool((tensor == float(name[1:])).all()) for name, tensor in wanted.items())
    assert counting.fetched <= 1.05 * 8 * 256 * 1024 * 4


@pytest.mark.parametrize("verify", ["off", "items"])
def test_some_rows_of_a_tensor_cost_what_they_weigh(counting, verify):
    full = torch.randn(4096, 2048)
    path = f"counting://rows{verify}"
    dcp.save({"x": full}, storage_writer=UCVolumeWriter(path))
    target = {"x": torch.zeros(1024, 2048)}
    counting.fetched = 0
    dcp.load(target, storage_reader=UCVolumeReader(path, verify=verify), planner=Slice(1500, 0))
    assert torch.equal(target["x"], full[1500:2524])
    assert counting.fetched <= 1.06 * target["x"].numel() * 4


@pytest.mark.parametrize(("verify", "most"), [("off", 1.01), ("items", 1.26)])
def test_a_share_of_each_expert_is_read_without_the_others_shares(counting, verify, most):
    full = torch.randn(3, 3072, 512)
    path = f"counting://experts{verify}"
    dcp.save({"x": full}, storage_writer=UCVolumeWriter(path))
    target = {"x": torch.zeros(3, 1024, 512)}
    counting.fetched = 0
    dcp.load(target, storage_reader=UCVolumeReader(path, verify=verify), planner=Slice(0, 1024, 0))
    assert torch.equal(target["x"], full[:, 1024:2048])
    assert counting.fetched <= most * target["x"].numel() * 4


@pytest.mark.parametrize("verify", ["off", "items"])
def test_any_slice_holds_the_right_elements(verify, tmp_path):
    full = torch.randn(6, 13, 30)
    dcp.save({"x": full}, storage_writer=UCVolumeWriter(tmp_path))
    for offsets in (0, 0, 0), (2, 7, 0), (1, 3, 5), (3, 9, 9):
        for sizes in (1, 1, 1), (1, 4, 30), (2, 4, 30), (1, 4, 21), (3, 1, 20):
            fits = [min(size, whole - start) for size, whole, start in zip(sizes, full.shape, offsets, strict=True)]
            target = {"x": torch.zeros(fits)}
            dcp.load(target, storage_reader=UCVolumeReader(tmp_path, verify=verify), planner=Slice(*offsets))
            wanted = full[tuple(slice(start, start + size) for start, size in zip(offsets, fits, strict=True))]
            assert torch.equal(target["x"], wanted), (offsets, fits)


# --- what it refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["directory", "memory"])
def test_a_flipped_bit_anywhere_in_the_data_is_noticed_and_names_file_and_tensor(place, tmp_path, make_state):
    path = tmp_path if place == "directory" else "memory://reader/flip"
    dcp.save(make_state(1), storage_writer=UCVolumeWriter(path))
    transport = open_transport(Volume.of(path))
    published = read_published(transport)
    for index, info in published.metadata.storage_data.items():
        if index.fqn == "empty":
            continue  # nothing of it is read
        intact = transport.read(info.relative_path)
        for position in (info.offset, info.offset + info.length // 2, info.offset + info.length - 1):
            damaged = bytearray(intact)
            damaged[position] ^= 4
            transport.put(info.relative_path, bytes(damaged))
            with pytest.raises(CheckpointException) as caught:
                dcp.load(make_state(None), storage_reader=UCVolumeReader(path))
            error = failure_of(caught)
            assert isinstance(error, CorruptCheckpointError)
            assert info.relative_path in str(error)
            assert index.fqn in str(error)
            assert "crc32c" in str(error)
        transport.put(info.relative_path, intact)


def test_stock_loads_the_flipped_bit_without_a_word(tmp_path, shards, flip):
    for name, writer in {"stock": FileSystemWriter, "ours": UCVolumeWriter}.items():
        dcp.save({"x": torch.ones(10_000)}, storage_writer=writer(tmp_path / name))
        flip(shards(tmp_path / name)[0], 20_000)
    target = {"x": torch.zeros(10_000)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "stock"))
    assert (target["x"] != 1).sum() == 1
    with pytest.raises(CheckpointException, match="'x' is damaged"):
        dcp.load(target, storage_reader=UCVolumeReader(tmp_path / "ours"))


def test_a_flipped_bit_in_rows_of_a_tensor_is_noticed_only_where_it_matters(tmp_path, shards, flip):
    dcp.save({"x": torch.ones(4096, 1024)}, storage_writer=UCVolumeWriter(tmp_path))
    flip(shards(tmp_path)[0], 10_000_000)  # in row 2441
    planner = Slice(2000, 0)
    with pytest.raises(CheckpointException, match="'x' is damaged"):
        dcp.load({"x": torch.zeros(1000, 1024)}, storage_reader=UCVolumeReader(tmp_path), planner=planner)
    target = {"x": torch.zeros(1000, 1024)}
    dcp.load(target, storage_reader=UCVolumeReader(tmp_path), planner=Slice(3000, 0))
    assert bool((target["x"] == 1).all())


def test_verify_files_notices_damage_in_what_is_not_even_loaded(tmp_path, shards, flip):
    dcp.save({"x": torch.ones(100_000), "y": torch.ones(100_000)}, storage_writer=UCVolumeWriter(tmp_path))
    flip(shards(tmp_path)[0], 600_000)
    dcp.load({"x": torch.zeros(100_000)}, storage_reader=UCVolumeReader(tmp_path))
    with pytest.raises(CheckpointException, match="is damaged"):
        dcp.load({"x": torch.zeros(100_000)}, storage_reader=UCVolumeReader(tmp_path, verify="files"))


@pytest.mark.parametrize(
    ("writer", "verify"), [(UCVolumeWriter, "off"), (UCVolumeWriter, "items"), (FileSystemWriter, "items")]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_missing_or_short_file_is_named(writer, verify, damage, tmp_path):
    dcp.save({"x": torch.ones(10_000)}, storage_writer=writer(tmp_path))
    [victim] = tmp_path.glob("*.distcp")
    if damage == "missing":
        victim.unlink()
    else:
        with victim.open("r+b") as file:
            file.truncate(victim.stat().st_size // 2 if damage == "truncated" else 0)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"x": torch.zeros(10_000)}, storage_reader=UCVolumeReader(tmp_path, verify=verify))
    error = failure_of(caught)
    assert isinstance(error, CorruptCheckpointError)
    assert victim.name in str(error)
    assert ("is missing" if damage == "missing" else "ends at byte") in str(error)


def test_a_short_object_in_s3_is_named(s3_volume):
    dcp.save({"x": torch.ones(10_000)}, storage_writer=UCVolumeWriter(s3_volume))
    transport = open_transport(s3_volume)
    [name] = [file.path for file in transport.list() if file.path.endswith(".distcp")]
    transport.put(name, transport.read(name)[:20_000])
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"x": torch.zeros(10_000)}, storage_reader=UCVolumeReader(s3_volume))
    assert isinstance(failure_of(caught), CorruptCheckpointError)
    assert f"{name} ends at byte 20000" in str(failure_of(caught))


def test_a_checkpoint_replaced_during_the_load_is_not_called_corrupt(tmp_path):
    dcp.save({"x": torch.ones(10)}, storage_writer=UCVolumeWriter(tmp_path))
    reader = UCVolumeReader(tmp_path)
    reader.provide(read_published(open_transport(Volume.of(tmp_path))))
    dcp.save({"x": torch.zeros(10)}, storage_writer=UCVolumeWriter(tmp_path))
    with pytest.raises(CheckpointException, match="was replaced by another save") as caught:
        dcp.load({"x": torch.zeros(10)}, storage_reader=reader)
    error = failure_of(caught)
    assert isinstance(error, CheckpointError)
    assert not isinstance(error, CorruptCheckpointError)


def test_nothing_published_says_so_in_words(tmp_path):
    with pytest.raises(CheckpointException, match="no checkpoint is published here"):
        dcp.load({"x": torch.zeros(1)}, storage_reader=UCVolumeReader(tmp_path / "none"))


def test_a_key_the_checkpoint_lacks_is_named(tmp_path):
    dcp.save({"x": torch.ones(1)}, storage_writer=UCVolumeWriter(tmp_path))
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: z"):
        dcp.load({"z": torch.zeros(1)}, storage_reader=UCVolumeReader(tmp_path))


@pytest.mark.parametrize("options", [{"verify": "some"}, {"threads": 0}])
def test_arguments_that_make_no_sense_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=next(iter(options))):
        UCVolumeReader(tmp_path, **options)


def test_storage_options_survive_reset(s3_volume):
    dcp.save({"x": torch.ones(3)}, storage_writer=UCVolumeWriter(s3_volume))
    target = {"x": torch.zeros(3)}
    reader = UCVolumeReader("s3://elsewhere/x", storage_options=s3_volume.storage_options)
    dcp.load(target, checkpoint_id=s3_volume.url, storage_reader=reader)
    assert target["x"].sum() == 3
