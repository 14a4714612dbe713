"""What only Ray has: placement, its own environments, connections, and workers that it ends itself."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import ray_cluster
from hypothesis import given
from hypothesis import strategies as st

from airdist import LaunchCancelledError, LaunchError, distributed
from airdist.engines import choose_engine
from airdist.engines.ray_job import Order, bundle_for, fits
from airdist.ray import ray_launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs process descriptors and /proc of Linux")

CPU_NODE = {"CPU": 16.0, "node:10.0.0.1": 1.0}
GPU_NODE = {"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
SMALL_NODE = {"CPU": 24.0, "GPU": 2.0, "accelerator_type:A10": 1.0}


def order(nodes=2, **wanted):
    return Order("job", "auto", [["agent"]] * nodes, {}, seconds=1, **wanted)


@pytest.mark.parametrize(
    ("wanted", "nodes", "bundle"),
    [
        ({"num_accelerators": 4}, [CPU_NODE] * 2, {"CPU": 4}),
        ({}, [CPU_NODE] * 2, {"CPU": 1}),
        ({"num_accelerators": 4}, [GPU_NODE] * 2, {"CPU": 4, "GPU": 4}),
        ({}, [GPU_NODE] * 2, {"CPU": 8, "GPU": 8}),
        ({}, [GPU_NODE, SMALL_NODE, CPU_NODE], {"CPU": 2, "GPU": 2}),
        ({"num_accelerators": 2, "cpus": 12}, [GPU_NODE] * 2, {"CPU": 12, "GPU": 2}),
        ({"num_accelerators": 2, "gpus": 0}, [GPU_NODE] * 2, {"CPU": 2}),
        ({"num_accelerators": 2, "cpus": 0, "gpus": 1}, [CPU_NODE], {"GPU": 1}),
        ({"num_accelerators": 2, "resources": {"rack": 1}}, [CPU_NODE] * 2, {"CPU": 2, "rack": 1}),
        (
            {"accelerator_type": "GPU_8xH100"},
            [GPU_NODE, GPU_NODE, SMALL_NODE],
            {"CPU": 8, "GPU": 8, "accelerator_type:H100": 0.001},
        ),
        # A cluster that has scaled down to its head node: what is asked for is what will make it grow.
        ({"num_accelerators": 8, "accelerator_type": "H100"}, [CPU_NODE], {"CPU": 8, "GPU": 8}),
    ],
)
def test_a_bundle_is_what_a_node_of_the_launch_needs(wanted, nodes, bundle):
    assert bundle_for(order(**wanted), nodes) == bundle


@given(
    sizes=st.lists(st.integers(0, 4), max_size=5),
    share=st.integers(1, 4),
    count=st.integers(1, 5),
)
def test_what_can_never_be_placed_is_known_from_the_sizes_of_the_nodes(sizes, share, count):
    nodes = [{"CPU": size} for size in sizes]
    slots = [number for number, size in enumerate(sizes) for _ in range(size // share)]
    assert fits({"CPU": share}, count, "PACK", nodes) == (len(slots) >= count)
    assert fits({"CPU": share}, count, "STRICT_SPREAD", nodes) == (len(set(slots)) >= count)
    assert fits({"CPU": share}, count, "STRICT_PACK", nodes) == any(slots.count(node) >= count for node in slots)
    assert not fits({"CPU": share, "GPU": 1}, count, "PACK", nodes)


def test_other_machines_are_those_of_the_ray_that_the_environment_names():
    assert choose_engine(None, remote=True, environ={"RAY_ADDRESS": "10.0.0.1:6379"}).name == "ray"
    assert choose_engine(None, remote=False, environ={"RAY_ADDRESS": "10.0.0.1:6379"}).name == "local"
    with pytest.raises(LaunchError, match="set RAY_ADDRESS"):
        choose_engine(None, remote=True, environ={})


@pytest.mark.parametrize(
    ("options", "what"),
    [({"strategy": "PACKED"}, "STRICT_SPREAD"), ({"gpus": -1}, "gpus=-1"), ({"num_cpus": 1}, "num_cpus: engine='ray'")],
)
def test_options_that_mean_nothing_are_refused_before_anything_starts(options, what):
    with pytest.raises(LaunchError, match=what):
        distributed(engine="ray", engine_options=options, tracking=False)(print).distributed()


def test_a_cluster_that_does_not_answer_is_named(cpu_only, monkeypatch):
    if lacking := ray_cluster.missing():
        pytest.skip(lacking)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(LaunchError, match=r"no Ray at '127\.0\.0\.1:9'.*RAY_ADDRESS"):
        distributed(engine="ray", tracking=False)(print).distributed()


def test_what_cannot_be_placed_says_what_there_is(ray_place):
    with pytest.raises(LaunchError) as caught:
        ray_place.launchable(print, nodes=3, engine_options={"start_timeout": 60, "queue_timeout": 6}).distributed()
    text = str(caught.value)
    assert "queue_timeout" in text
    assert (
        "3 x (2 CPU) cannot be placed by STRICT_SPREAD, ever: available are 4 CPU; the nodes have 2 CPU; 2 CPU" in text
    )


def test_a_request_for_more_than_there_will_ever_be_ends_by_itself(ray_place, caplog):
    launch = ray_place.launchable(print, num_accelerators=3, engine_options={"start_timeout": 10}).submit()
    assert "2 x (3 CPU) cannot be placed by STRICT_SPREAD, ever" in str(launch.exception(120))
    assert "waits: 2 x (3 CPU)" in caplog.text


def test_a_launch_that_waits_for_room_can_be_cancelled_and_another_has_it(ray_place, pids):
    def work():
        pids.write("rank")
        while not os.path.exists(pids.path + ".go"):
            time.sleep(0.05)
        return os.environ["NODE_RANK"]

    first = ray_place.launchable(work).submit()
    pids.wait_for("rank", 4)
    waiting = ray_place.launchable(work).submit()
    while not waiting.job_id:
        time.sleep(0.05)
    waiting.cancel()
    # Before the driver's own end, without a word from its caller, would be forced.
    assert isinstance(waiting.exception(35), LaunchCancelledError)
    packed = {"engine_options": {"strategy": "PACK"}, "num_accelerators": 1}
    last = ray_place.launchable(work, **packed).submit()
    open(pids.path + ".go", "w").close()
    assert first.result(60) == ["0", "0", "1", "1"]
    assert last.result(120) == ["0", "1"]


def test_the_environment_of_ray_reaches_the_ranks_and_the_secret_reaches_nobody(ray_place, tmp_path, monkeypatch):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "only_there.py").write_text("VALUE = 42\n")
    runtime_env = {"working_dir": str(tmp_path / "shipped"), "env_vars": {"FLAVOUR": "ray", "OTHER": "ray"}}
    monkeypatch.setenv("FLAVOUR", "caller")

    def work():
        import only_there

        agent = psutil.Process(os.getppid())
        secret = agent.environ()["AIRDIST_SECRET"]
        told = [process.info["pid"] for process in psutil.process_iter(["cmdline"]) if secret in str(process.info)]
        known = [os.environ.get(name) for name in ("FLAVOUR", "OTHER", "MORE")]
        return only_there.VALUE, known, told, "AIRDIST_SECRET" in os.environ

    launchable = ray_place.launchable(
        work, num_accelerators=1, engine_options={"runtime_env": runtime_env}, env={"OTHER": "env", "MORE": "env"}
    )
    assert launchable.distributed() == [(42, ["ray", "env", "env"], [], False)] * 2


def test_a_caller_that_is_connected_stays_so_and_one_that_is_not_is_not_touched(ray_place, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from airdist import distributed

        @distributed(engine="ray", nodes=2, num_accelerators=1, tracking=False, logs="none")
        def work():
            return os.environ["RANK"], os.environ.get("FLAVOUR")

        if __name__ == "__main__":
            assert work.distributed() == [("0", None), ("1", None)]
            assert "ray" not in sys.modules
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            import ray
            ray.init(
                address=os.environ.pop("RAY_ADDRESS"),
                runtime_env={"env_vars": {"FLAVOUR": "of the connection"}},
                log_to_driver=False,
                logging_level="ERROR",
            )
            mine = ray.put("still here")
            assert work.distributed() == [("0", "of the connection"), ("1", "of the connection")]
            assert ray.get(mine) == "still here"
        """)
    )
    subprocess.run([sys.executable, str(script)], env={**os.environ, **ray_place.environ}, timeout=150, check=True)


def test_a_worker_that_ray_ends_is_a_node_taken_away_and_the_launch_goes_on_in_another_place(ray_place, pids):
    def work():
        pids.write(f"rank-{os.environ['NODE_RANK']}")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0:
            if os.environ["NODE_RANK"] == "1":
                pids.wait_for("rank-0", 1)
                # What a rank has started ends too.
                pids.write("child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
                agent = psutil.Process(os.getppid())
                worker = agent.parent().parent()
                assert "ray::" in worker.cmdline()[0], worker.cmdline()
                worker.kill()
            time.sleep(600)
        return attempt

    launchable = ray_place.launchable(work, num_accelerators=1, max_restarts=1)
    assert launchable.distributed() == [1, 1]
    pids.wait_for_end()


def test_the_death_of_the_driver_ends_the_ranks(ray_place, pids):
    def work():
        pids.write("rank")
        pids.write("child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        time.sleep(600)

    launch = ray_place.launchable(work, num_accelerators=1).submit()
    try:
        pids.wait_for("rank", 2, 120)
    finally:
        print(launch, launch.job_id)
    (driver,) = [
        process
        for process in psutil.Process().children()
        if any("airdist.engines.ray_job" in part for part in process.cmdline())
    ]
    driver.kill()
    assert isinstance(launch.exception(120), LaunchError)
    pids.wait_for_end()


def test_a_ray_of_its_own_over_the_nodes_of_a_launch_leaves_the_ray_that_runs_alone(ray_place):
    @ray_launch(**ray_place.settings, tracking=False, timeout=150)
    def body(count):
        import ray

        @ray.remote(num_cpus=1)
        def square(number):
            return number * number, [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ]

        inner = ray.get_runtime_context().gcs_address
        return ray.get([square.remote(number) for number in range(count)]), len(ray.nodes()), inner

    value, *others = body.distributed(3)
    squares, nodes, address = value
    assert squares == [(0, []), (1, []), (4, [])]
    assert nodes == 2
    assert address != ray_place.environ["RAY_ADDRESS"]
    assert others == [None] * 3
