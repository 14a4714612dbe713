"""What `ray_init` and `ray_launch` promise: a Ray of one's own around one call, and nothing of it afterwards."""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from airdist import LaunchError
from airdist.ray import RayFunction, ray_init, ray_launch

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install 'airdata[ray]')")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's signal at a parent's death")


@ray_launch(num_accelerators=2, tracking=False)
def double(number):
    return 2 * number


def processes_of(folder):
    """Of a Ray that has its directory below `folder`: every process of Ray has that in its arguments or environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in f"{process.cmdline()} {process.environ()}":
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def wait_for_end(folder, seconds=60):
    deadline = time.monotonic() + seconds
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture
def temp_dir(monkeypatch, cpu_world):
    """Where Ray keeps its files: a short name, below which sockets have theirs."""
    folder = Path("/tmp", f"airdist-test-{os.getpid()}")
    folder.mkdir()
    monkeypatch.setenv("RAY_TEMP_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_a_call_that_is_not_distributed_is_an_ordinary_call():
    assert double(4) == 8


def test_the_function_travels_by_name_and_keeps_its_kind_when_settings_change():
    assert pickle.loads(pickle.dumps(double)) is double
    other = double.with_overrides(timeout=60)
    assert isinstance(other, RayFunction)
    assert (other.settings.timeout, double.settings.timeout) == (60, 3 * 3600)


def test_it_decorates_without_arguments_and_methods_too():
    class Tuner:
        @ray_launch
        def tune(self):
            return self

    assert isinstance(Tuner().tune, RayFunction)


def test_devices_for_each_rank_are_refused_since_ray_gives_them_to_tasks():
    with pytest.raises(ValueError, match="isolate_devices means nothing here"):
        ray_launch(isolate_devices=True)(print)


@needs_ray
def test_a_directory_with_too_long_a_name_is_refused_with_one_that_works(monkeypatch, cpu_world, tmp_path):
    monkeypatch.setenv("RAY_TEMP_DIR", str(tmp_path / ("long" * 20)))
    with pytest.raises(LaunchError, match="set RAY_TEMP_DIR, for instance to /tmp/ray"):
        ray_init()
    with pytest.raises(LaunchError, match="set RAY_TEMP_DIR, for instance to /tmp/ray"):
        double.distributed(1)


def test_without_ray_the_error_says_what_to_install(monkeypatch, cpu_world):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"install 'airdata\[ray\]'"):
        ray_init()


@needs_ray
@linux
def test_the_body_runs_once_as_the_driver_and_everything_is_gone_afterwards(temp_dir, tmp_path):
    @ray_launch(num_accelerators=2, tracking=False, timeout=150)
    def body(mark):
        import ray

        with open(mark, "a") as file:
            file.write("once\n")
        world = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]

        @ray.remote
        def there():
            names = [*world, "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"]
            return [name for name in names if name in os.environ], os.environ["RAY_AUTH_TOKEN"]

        inside, token = ray.get(there.remote())

        return world, inside, token == os.environ["RAY_AUTH_TOKEN"], len(ray.nodes())

    results = body.distributed(str(tmp_path / "mark"))
    assert results == [([], [], True, 1), None]
    assert (tmp_path / "mark").read_text() == "once\n"
    wait_for_end(temp_dir, 10)
    assert list(temp_dir.iterdir()) == []


@needs_ray
@linux
def test_the_bodys_exception_comes_back_and_the_logs_of_ray_stay(temp_dir):
    @ray_launch(num_accelerators=1, tracking=False, timeout=150, logs="none")
    def body():
        raise FloatingPointError("too large")

    launch = body.submit()
    error = launch.exception(150)
    assert isinstance(error, FloatingPointError)
    wait_for_end(temp_dir, 10)
    (kept,) = temp_dir.iterdir()
    assert f"Ray's own logs are kept: {kept}" in launch.logs(0)


ENDLESS = """
import os, sys, time
from airdist.ray import ray_init, ray_launch

def work(mark):
    import ray

    @ray.remote
    def sleep():
        open(mark, "w").close()
        time.sleep(600)

    ray.get(sleep.remote())

if __name__ == "__main__":
    if sys.argv[1] == "ray_launch":
        ray_launch(num_accelerators=1, tracking=False)(work).distributed(sys.argv[2])
    else:
        ray_init()
        assert ray_init().address_info["address"]
        work(sys.argv[2])
"""


@needs_ray
@linux
@pytest.mark.parametrize("how", ["ray_launch", "ray_init"])
def test_a_killed_caller_takes_its_ray_along(temp_dir, tmp_path, how):
    (tmp_path / "script.py").write_text(ENDLESS)
    mark = tmp_path / "mark"
    with subprocess.Popen([sys.executable, str(tmp_path / "script.py"), how, str(mark)], cwd=tmp_path) as caller:
        deadline = time.monotonic() + 150
        while not mark.exists():
            assert time.monotonic() < deadline
            assert caller.poll() is None
            time.sleep(0.1)
        assert any("raylet" in str(process.cmdline()) for process in processes_of(temp_dir))
        caller.kill()
    wait_for_end(temp_dir)
