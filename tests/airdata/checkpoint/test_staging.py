import os

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.staging import AsyncStager

from airdata.checkpoint import Stager, UCVolumeReader, UCVolumeWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_what_is_staged_does_not_change_any_more(make_state, assert_same):
    state = make_state(1)
    staged = Stager().stage(state)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.detach().fill_(0)
    state["nested"]["list"][0].fill_(7)
    state["nested"]["number"] = 9
    assert_same(staged, {**make_state(1), "parameter": make_state(1)["parameter"].detach()})


def test_the_buffer_is_used_again(make_state):
    stager = Stager()
    first = stager.stage({"x": torch.ones(1000), "y": torch.ones(5)})
    second = stager.stage({"x": torch.zeros(1000), "y": torch.zeros(5)})
    assert first["x"].data_ptr() == second["x"].data_ptr()
    assert second["y"].sum() == 0
    assert stager.stage({"x": torch.full((100_000,), 3.0)})["x"].sum() == 300_000
    stager.close()
    assert stager.stage({"x": torch.ones(3)})["x"].sum() == 3


def test_tied_weights_are_copied_once():
    weight = torch.randn(100, 100)
    staged = Stager().stage({"embedding": weight, "head": weight, "row": weight[0]})
    assert staged["embedding"].data_ptr() == staged["head"].data_ptr()
    assert torch.equal(staged["row"], weight[0])


def test_what_dcp_pickles_does_not_drag_the_buffer_along(tmp_path):
    stager = Stager()
    staged = stager.stage({"big": torch.zeros(1_000_000), "box": (torch.ones(3), [torch.ones(2)])})
    dcp.save({"box": staged["box"]}, storage_writer=UCVolumeWriter(tmp_path))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) < 10_000


def test_dtensors_keep_their_placement(run_ranks, tmp_path):
    outputs = run_ranks(
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor, Shard, DTensor
        x = distribute_tensor(torch.arange(10.), init_device_mesh("cpu", (world,)), [Shard(0)])
        stager = Stager()
        staged = stager.stage({"x": x})["x"]
        x.to_local().zero_()
        assert type(staged) is DTensor and staged.placements == x.placements and staged.device_mesh == x.device_mesh
        assert staged.to_local().data_ptr() == stager.stage({"x": x * 1})["x"].to_local().data_ptr()
        x = distribute_tensor(torch.arange(10.), init_device_mesh("cpu", (world,)), [Shard(0)])
        print(stager.stage({"x": x})["x"].full_tensor().tolist() == list(range(10)))
        """,
        str(tmp_path),
    )
    assert outputs == ["True\n"] * 2


def test_it_stages_for_async_save_of_dcp(tmp_path):
    stager = Stager()
    assert isinstance(stager, AsyncStager)
    for value in (1.0, 2.0):
        state = {"x": torch.full((1000,), value)}
        future = dcp.async_save(state, storage_writer=UCVolumeWriter(tmp_path), async_stager=stager, no_dist=True)
        state["x"].zero_()
        future.result()
        target = {"x": torch.zeros(1000)}
        dcp.load(target, storage_reader=UCVolumeReader(tmp_path))
        assert target["x"].sum() == 1000 * value
    dcp.load(target, storage_reader=FileSystemReader(tmp_path))


def test_ten_stagings_do_not_grow():
    stager = Stager()
    state = {"x": torch.ones(5_000_000), "y": {"z": torch.ones(100_000)}}
    stager.stage(state)
    before = psutil.Process(os.getpid()).memory_info().rss
    for _ in range(10):
        stager.stage(state)
    assert psutil.Process(os.getpid()).memory_info().rss - before < 15_000_000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_device_tensors_are_staged_through_locked_memory():
    state = {"x": torch.arange(1_000_000.0, device="cuda"), "t": torch.randn(30, 50, device="cuda").t()}
    expected = {key: value.cpu().clone() for key, value in state.items()}
    stager = Stager()
    staged = stager.stage(state)
    for value in state.values():
        value.zero_()
    torch.cuda.synchronize()
    assert all(torch.equal(staged[key], expected[key]) for key in state)
    assert all(value.device.type == "cpu" for value in staged.values())
    stager.close()
