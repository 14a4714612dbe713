"""The platform's names: code written for it imports here, and the real packages are never hidden."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import airdist.ray
from airdist import compat, devices, runtime


def run(code, *, path=(), bare=False):
    """Run code in a fresh interpreter, with directories in front of its import path; what it printed, by words.

    A bare one has no installed packages: MLflow brings `databricks-sdk`, and with it a real package `databricks`.
    """
    environ = {name: value for name, value in os.environ.items() if name != compat.INSTALLED}
    source = [Path(airdist.ray.__file__).parents[1]] if bare else []
    environ["PYTHONPATH"] = os.pathsep.join(map(str, [*path, *source]))
    command = [sys.executable, *(["-S"] if bare else []), "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def package(directory, name, text):
    path = directory.joinpath(*name.split("."))
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(text)


def test_names_are_the_packages_own():
    assert compat.AcceleratorType is devices.AcceleratorType
    assert compat.GPUType is devices.GPUType
    assert compat.runtime is runtime
    assert compat.distributed is importlib.import_module("airdist.decorator").distributed


def test_nothing_is_importable_before_installing():
    code = "import importlib.util as u; print(u.find_spec('serverless_gpu'), u.find_spec('databricks'))"
    assert run(code, bare=True) == ["None", "None"]


def test_a_notebook_of_the_platform_imports_what_it_always_did():
    code = """
import airdist.compat
airdist.compat.install()
from databricks.air import AcceleratorType, GPUType, distributed, ray_init, ray_launch, runtime
from databricks.air.runtime import get_global_rank
import databricks.air
import databricks.air.data
import serverless_gpu.runtime as rt
from serverless_gpu import distributed as old
from serverless_gpu.launcher import distributed as older
from serverless_gpu.compute import GPUType as OldType
from serverless_gpu.ray import ray_launch as old_ray
import airdist.runtime
assert databricks.air.distributed is distributed is old is older
assert rt is runtime is databricks.air.runtime is airdist.runtime
assert GPUType is OldType and ray_launch is old_ray
assert AcceleratorType.GPU_8xH100 == "GPU_8xH100"
print(rt.get_world_size(), get_global_rank())
"""
    assert run(code) == ["1", "0"]


def test_data_names_come_from_airdata_at_their_first_use():
    code = """
import sys
from airdist import compat
compat.install()
import databricks.air.data
import serverless_gpu.data
heavy = [name for name in ("airdata", "torch", "mlflow") if name in sys.modules]
from databricks.air.data import UCVolumeDataset
import airdata
print(heavy, UCVolumeDataset is airdata.UCVolumeDataset is compat.UCVolumeDataset)
"""
    assert run(code) == ["[]", "True"]


def test_a_name_that_is_not_there_yet_says_so():
    code = """
from airdist import compat
compat.install()
try:
    from databricks.air.data import UCDataset
except ImportError as error:
    print(error)
print(hasattr(compat, "nonsense"))
"""
    said = " ".join(run(code))
    assert said == "UCDataset is documented for databricks.air.data, but airdata does not provide it yet. False"


def test_installing_reports_what_is_ours_and_tells_child_processes():
    code = """
import os
from airdist import compat
first = compat.install()
print(*first, compat.install() == first, os.environ["AIRDIST_COMPAT"])
"""
    assert run(code, bare=True) == [
        "databricks",
        "databricks.air",
        "databricks.air.data",
        "databricks.air.runtime",
        "serverless_gpu",
        "serverless_gpu.compute",
        "serverless_gpu.data",
        "serverless_gpu.launcher",
        "serverless_gpu.ray",
        "serverless_gpu.runtime",
        "True",
        "1",
    ]


def test_a_real_package_is_never_hidden(tmp_path):
    package(tmp_path, "databricks", "")
    package(tmp_path, "databricks.air", "real = True")
    package(tmp_path, "serverless_gpu", "real = True")
    code = """
import os
from airdist import compat
print(compat.install(), "AIRDIST_COMPAT" in os.environ)
import databricks.air, serverless_gpu
print(databricks.air.real, serverless_gpu.real, hasattr(serverless_gpu, "distributed"))
"""
    assert run(code, path=[tmp_path]) == ["()", "False", "True", "True", "False"]


@pytest.mark.parametrize("kind", ["regular", "namespace"])
def test_another_package_of_the_same_vendor_keeps_what_it_has(tmp_path, kind):
    package(tmp_path, "databricks.sdk", "real = True")
    if kind == "regular":
        (tmp_path / "databricks" / "__init__.py").write_text("")
    code = """
from airdist import compat
compat.install()
import databricks.sdk, databricks.air
print(databricks.sdk.real, databricks.air.GPUType.H100)
"""
    assert run(code, path=[tmp_path], bare=True) == ["True", "H100"]


def test_a_function_that_refers_to_runtime_can_be_pickled_for_a_rank_without_the_names():
    code = """
import cloudpickle, subprocess, sys
from airdist import compat
compat.install()
from databricks.air import runtime
def f():
    return runtime.get_world_size()
there = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read())())"
print(subprocess.run([sys.executable, "-c", there], input=cloudpickle.dumps(f), capture_output=True, check=True).stdout)
"""
    assert run(code) == ["b'1\\n'"]
