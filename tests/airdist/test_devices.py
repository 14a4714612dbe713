"""Allocation of accelerators, against a real program called `nvidia-smi` that answers as the driver's does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdist.devices import AcceleratorType, Allocation, GPUType, allocate, check_accelerator_type, select_visible
from airdist.driver import Device, model_of, query_devices
from airdist.errors import DeviceError

H100 = "NVIDIA H100 80GB HBM3"


class FakeMachine:
    """Writes an `nvidia-smi` into a directory and gives the environment that finds it."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()

    def program(self, body: str) -> None:
        path = self.bin / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def gpus(self, *names: str, mig: tuple[int, ...] = (), listing: str = "", apps: str = "") -> None:
        rows = "\n".join(
            f"{index}, GPU-{index:08x}, {name}, 81559, {'Enabled' if index in mig else 'Disabled'}"
            for index, name in enumerate(names)
        )
        self.program(
            f'case "$*" in\n'
            f"--query-gpu=*) cat <<'END'\n{rows}\nEND\n;;\n"
            f"--query-compute-apps=*) cat <<'END'\n{apps}\nEND\n;;\n"
            f"-L) cat <<'END'\n{listing}\nEND\n;;\n"
            f'*) echo unexpected "$*"; exit 2 ;;\nesac'
        )

    def environ(self, **more: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:/usr/bin:/bin", **more}


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


def mig_machine(machine):
    machine.gpus(
        H100,
        H100,
        mig=(1,),
        listing=(
            f"GPU 0: {H100} (UUID: GPU-00000000)\n"
            f"GPU 1: {H100} (UUID: GPU-00000001)\n"
            "  MIG 3g.40gb     Device  0: (UUID: MIG-aaaa)\n"
            "  MIG 3g.40gb     Device  1: (UUID: MIG-bbbb)"
        ),
    )


def test_all_accelerators_are_used_when_no_number_is_given(machine):
    machine.gpus(*[H100] * 8)
    assert allocate(None, None, environ=machine.environ()) == Allocation(8, "0,1,2,3,4,5,6,7", None, "GPU_8xH100")


def test_fewer_accelerators_than_there_are_share_a_shorter_list(machine):
    machine.gpus(*[H100] * 8)
    allocation = allocate(3, AcceleratorType.GPU_8xH100, environ=machine.environ())
    assert allocation == Allocation(3, "0,1,2", None, "GPU_8xH100")


def test_isolated_ranks_see_one_accelerator_each(machine):
    machine.gpus(*[H100] * 2)
    assert allocate(2, None, isolate=True, environ=machine.environ()).per_rank_visible == ("0", "1")


def test_more_than_visible_is_refused_with_both_counts(machine):
    machine.gpus("NVIDIA A10G")
    with pytest.raises(DeviceError, match=r"num_accelerators=4, but 1 accelerator\(s\) are visible: 0: NVIDIA A10G"):
        allocate(4, None, environ=machine.environ())


def test_a_mask_that_hides_the_missing_ones_is_named(machine):
    machine.gpus(*[H100] * 8)
    with pytest.raises(DeviceError, match=r"2 accelerator\(s\) are visible, because CUDA_VISIBLE_DEVICES='6,7'"):
        allocate(8, None, environ=machine.environ(CUDA_VISIBLE_DEVICES="6,7"))


@pytest.mark.parametrize("wanted", ["GPU_1xA10", "a10", "A10G", GPUType.A10, AcceleratorType.GPU_1xA10])
def test_an_a10g_is_what_is_sold_as_a10(machine, wanted):
    machine.gpus("NVIDIA A10G")
    assert allocate(None, wanted, environ=machine.environ()).accelerator_type == "GPU_1xA10"


@pytest.mark.parametrize("wanted", ["H100", "GPU_8xH200", "GPU_1xH200"])
def test_another_type_than_the_attached_one_is_refused(machine, wanted):
    machine.gpus(*["NVIDIA H200"] * 2)
    with pytest.raises(DeviceError, match=f"accelerator_type='{wanted}' was asked for, but this machine is GPU_2xH200"):
        allocate(None, wanted, environ=machine.environ())


def test_a_model_alone_matches_any_count(machine):
    machine.gpus(*["NVIDIA H200"] * 2)
    assert allocate(1, "h200", environ=machine.environ()).nprocs == 1


def test_the_type_counts_the_machine_and_not_the_mask(machine):
    machine.gpus(*[H100] * 8)
    allocation = allocate(None, "GPU_8xH100", environ=machine.environ(CUDA_VISIBLE_DEVICES="6,7"))
    assert allocation == Allocation(2, "6,7", None, "GPU_8xH100")


def test_mixed_models_have_no_type_and_fit_only_where_all_chosen_do(machine):
    machine.gpus(H100, "NVIDIA A10")
    assert allocate(None, None, environ=machine.environ()).accelerator_type is None
    assert allocate(1, "H100", environ=machine.environ()).nprocs == 1
    with pytest.raises(DeviceError, match="of mixed models"):
        allocate(2, "H100", environ=machine.environ())


def test_uuids_in_the_mask_are_kept_as_they_are(machine):
    machine.gpus(*[H100] * 2)
    environ = machine.environ(CUDA_VISIBLE_DEVICES="GPU-00000001, 0")
    assert allocate(None, None, environ=environ).visible == "GPU-00000001,0"


def test_without_a_driver_ranks_run_on_the_cpu(tmp_path):
    environ = {"PATH": str(tmp_path)}
    assert allocate(None, None, environ=environ) == Allocation(1)
    assert allocate(3, None, environ=environ) == Allocation(3)


@pytest.mark.parametrize("mask", ["", "-1", " ", "-1,0"])
def test_a_mask_of_nothing_runs_on_the_cpu_without_asking_the_driver(machine, tmp_path, mask):
    machine.program(f"touch {tmp_path}/asked; sleep 600")
    assert allocate(2, None, environ=machine.environ(CUDA_VISIBLE_DEVICES=mask)) == Allocation(2)
    assert not (tmp_path / "asked").exists()


def test_a_type_without_any_accelerator_is_refused(tmp_path):
    with pytest.raises(
        DeviceError, match="'H100' was asked for, but no accelerator is visible: the driver reports none"
    ):
        allocate(None, "H100", environ={"PATH": str(tmp_path)})


@pytest.mark.parametrize("number", [0, -2])
def test_no_process_at_all_is_refused(machine, number):
    machine.gpus(H100)
    with pytest.raises(DeviceError, match=f"num_accelerators={number}"):
        allocate(number, None, environ=machine.environ())


def test_mig_instances_are_masked_one_to_a_rank(machine):
    mig_machine(machine)
    allocation = allocate(None, "H100", environ=machine.environ())
    assert allocation.per_rank_visible == ("0", "MIG-aaaa", "MIG-bbbb")
    assert allocation.visible == "0,MIG-aaaa,MIG-bbbb"


@pytest.mark.parametrize("mask", ["1", "GPU-00000001", "MIG-aaaa,MIG-bbbb"])
def test_a_gpu_in_mig_mode_stands_for_its_instances(machine, mask):
    mig_machine(machine)
    allocation = allocate(None, None, environ=machine.environ(CUDA_VISIBLE_DEVICES=mask))
    assert allocation.per_rank_visible == ("MIG-aaaa", "MIG-bbbb")


def test_mig_mode_without_instances_says_how_to_make_some(machine):
    machine.gpus(H100, mig=(0,), listing=f"GPU 0: {H100} (UUID: GPU-00000000)")
    with pytest.raises(DeviceError, match="mig -cgi"):
        allocate(None, None, environ=machine.environ())


def test_memory_is_told_in_bytes(machine):
    machine.gpus(H100)
    assert query_devices(machine.environ()) == (Device(0, "GPU-00000000", H100, 81559 << 20),)


def test_a_driver_that_hangs_is_an_error_in_time_and_leaves_no_process(machine, tmp_path):
    machine.program(f"sleep 600 & echo $! >> {tmp_path}/pids; wait")
    started = time.monotonic()
    with pytest.raises(DeviceError, match=r"gave no answer in 0.5 s.*CUDA_VISIBLE_DEVICES=''"):
        allocate(None, None, environ=machine.environ(AIRDIST_DEVICE_TIMEOUT="0.5"))
    assert time.monotonic() - started < 20
    children = [int(line) for line in (tmp_path / "pids").read_text().split()] if (tmp_path / "pids").exists() else []
    deadline = time.monotonic() + 10
    while any(map(running, children)):
        assert time.monotonic() < deadline, f"still running: {children}"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("status", "text"), [(9, "couldn't communicate with the NVIDIA driver"), (6, "No devices were found")]
)
def test_tools_without_a_gpu_warn_and_run_on_the_cpu(machine, caplog, status, text):
    machine.program(f'echo "{text}"; exit {status}')
    assert allocate(2, None, environ=machine.environ()) == Allocation(2)
    assert text in caplog.text


def test_no_devices_with_success_is_the_cpu(machine):
    machine.program('echo "No devices were found"')
    assert allocate(None, None, environ=machine.environ()) == Allocation(1)


def test_a_failing_driver_is_an_error_with_what_it_said(machine):
    machine.program('echo "Unable to determine the device handle"; exit 15')
    with pytest.raises(DeviceError, match="status 15 and said: Unable to determine"):
        allocate(None, None, environ=machine.environ())


def test_an_answer_of_another_shape_is_an_error(machine):
    machine.program('echo "zero, GPU-0, name, 1, Disabled"')
    with pytest.raises(DeviceError, match="nvidia-smi said 'zero, GPU-0"):
        allocate(None, None, environ=machine.environ())


def test_memory_held_by_the_caller_is_warned_of(machine, caplog):
    machine.gpus(H100, apps=f"1, GPU-00000000, 400\n{os.getpid()}, GPU-00000000, 1634")
    allocate(None, None, environ=machine.environ())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "This process holds 1634 MiB on GPU-00000000" in caplog.text


def test_a_driver_that_hides_processes_does_not_matter(machine, caplog):
    machine.gpus(H100, apps="[Insufficient Permissions]")
    assert allocate(None, None, environ=machine.environ()).nprocs == 1
    assert not caplog.records


def test_torch_is_not_imported():
    code = "import sys, airdist.devices; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA A10-24Q", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "H100"),
    ],
)
def test_models_are_read_from_driver_names(name, model):
    assert model_of(name) == model
    assert check_accelerator_type(model) == model


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        (None, None),
        ("a10", "A10"),
        ("H100", "H100"),
        (GPUType.H100, "H100"),
        (AcceleratorType.GPU_8xH100, "GPU_8xH100"),
        ("gpu_8xh100", "GPU_8xH100"),
        (" GPU_8xH200 ", "GPU_8xH200"),
        ("GPU_1xA10G", "GPU_1xA10"),
        ("GPU_16xB300", "GPU_16xB300"),
    ],
)
def test_names_of_types_are_brought_to_one_form(given, normal):
    assert check_accelerator_type(given) == normal


@pytest.mark.parametrize("given", ["", "H1OO", "GPU_8H100", "GPU_0xH100", "GPU_xH100", "cpu", 8, True, ["H100"]])
def test_what_is_not_a_type_is_refused_with_what_is(given):
    with pytest.raises(
        ValueError, match=r"not an accelerator type. Accepted are GPU_1xA10, .*GPU_<GPUs per node>x<model>"
    ):
        check_accelerator_type(given)


EIGHT = tuple(Device(index, f"GPU-{index:08x}", H100) for index in range(8))


def visible(mask):
    return [device.index for device, _ in select_visible(mask, EIGHT)]


@given(st.lists(st.integers(0, 7), unique=True, max_size=8), st.randoms())
def test_any_spelling_of_distinct_devices_selects_them_in_its_order(indices, random):
    tokens = [str(index) if random.random() < 0.5 else f"GPU-{index:08x}" for index in indices]
    assert visible(",".join(tokens)) == indices


@given(st.lists(st.integers(0, 20), max_size=10))
def test_the_list_ends_where_cuda_ends_it(indices):
    kept = indices[: next((at for at, index in enumerate(indices) if index > 7), len(indices))]
    assert visible(",".join(map(str, indices))) == (kept if len(set(kept)) == len(kept) else [])


@given(st.text(alphabet="0123456789,-GPUMIG abcdef", max_size=20))
def test_no_mask_breaks_the_parser(mask):
    chosen = visible(mask)
    assert len(set(chosen)) == len(chosen) <= 8


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(None, list(range(8))), ("3,-1,4", [3]), ("2,,3", [2]), ("GPU-0", []), ("GPU-00000003", [3]), ("nonsense", [])],
)
def test_masks_follow_cuda(mask, expected):
    assert visible(mask) == expected
