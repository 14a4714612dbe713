"""What only Spark has: a session, slots, addresses of GPUs, and tasks that it kills and starts again by itself."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from airdist import LaunchCancelledError, LaunchError, distributed
from airdist.engines.remote import AgentCommand
from airdist.engines.spark import SparkEngine

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs process descriptors and /proc of Linux"),
    pytest.mark.timeout(400),  # the first one starts three Javas
]

PAGE = Path(__file__).parents[2] / "docs" / "from-torch-distributor.md"


@pytest.mark.parametrize(
    ("options", "what"), [({"cpus": 0}, "cpus=0"), ({"gpus": 0.5}, "gpus=0.5"), ({"cores": 1}, "cores: engine='spark'")]
)
def test_options_that_mean_nothing_are_refused_before_anything_starts(options, what):
    with pytest.raises(LaunchError, match=re.escape(what)):
        distributed(engine="spark", engine_options=options, tracking=False)(print).distributed()


def test_a_process_without_a_session_is_told_to_make_one():
    program = "from airdist import distributed; distributed(engine='spark', tracking=False)(print).distributed()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert re.search(r"LaunchError: engine='spark'.*(getOrCreate\(\)|install 'airdata\[spark\]')", done.stderr)


def test_executors_that_come_and_go_are_refused(spark_place, spark):
    conf = spark.context._conf
    conf.set("spark.dynamicAllocation.enabled", "true")
    try:
        with pytest.raises(LaunchError, match=r"dynamicAllocation\.enabled=false"):
            spark_place.launchable(print).distributed()
    finally:
        conf.set("spark.dynamicAllocation.enabled", "false")


def test_ranks_see_the_gpus_of_their_task_and_the_secret_is_in_no_argument_and_no_file(spark_place, spark):
    spark.context.setJobGroup("mine", "what the caller does")

    def work():
        agent = psutil.Process(os.getppid())
        secret = agent.environ()["AIRDIST_SECRET"]
        told = [process.info["pid"] for process in psutil.process_iter(["cmdline"]) if secret in str(process.info)]
        seen = os.environ["CUDA_VISIBLE_DEVICES"], "AIRDIST_SECRET" in os.environ, told
        return seen, secret, os.environ["AIRDIST_LAUNCH_DIR"]

    results = spark_place.launchable(work, num_accelerators=1).distributed()
    assert [seen for seen, _, _ in results] == [("97,98", False, [])] * 2
    secret = results[0][1].encode()
    files = [Path(folder, name) for folder, _, names in os.walk(spark.home.name) for name in names]
    assert any(b"SparkListenerJobStart" in path.read_bytes() for path in files if "/events/" in str(path))
    assert [path for path in files if path.stat().st_size < 64 << 20 and secret in path.read_bytes()] == []
    assert not any(os.path.exists(directory) for _, _, directory in results)
    assert spark.context.getLocalProperty("spark.jobGroup.id") == "mine"


def test_a_node_can_ask_for_less_than_an_executor(spark_place):
    options = {"cpus": 1, "gpus": 1}
    launchable = spark_place.launchable(
        lambda: os.environ["CUDA_VISIBLE_DEVICES"], nodes=4, num_accelerators=1, engine_options=options
    )
    assert sorted(launchable.distributed()) == ["97", "97", "98", "98"]


def test_more_nodes_than_there_are_slots_are_both_numbers_in_the_message(spark_place):
    with pytest.raises(LaunchError, match=r"3 nodes are 3 tasks at the same time.*have room for 2"):
        spark_place.launchable(print, nodes=3, engine_options={"start_timeout": 1}).distributed()


def test_a_launch_that_waits_for_slots_can_be_cancelled(spark_place, pids):
    def work():
        pids.write("rank")
        while not os.path.exists(pids.path + ".go"):
            time.sleep(0.05)
        return os.environ["NODE_RANK"]

    first = spark_place.launchable(work, num_accelerators=1).submit()
    pids.wait_for("rank", 2, 180)
    waiting = spark_place.launchable(work, num_accelerators=1).submit()
    late = spark_place.launchable(work, num_accelerators=1, engine_options={"queue_timeout": 1}).submit()
    assert re.search("queue_timeout.*free at the same time", str(late.exception(120)))
    waiting.cancel()
    assert isinstance(waiting.exception(120), LaunchCancelledError)
    open(pids.path + ".go", "w").close()
    assert first.result(120) == ["0", "1"]
    assert len(pids.read("rank")) == 2


def above(pid, name):
    """The nearest ancestor of a process whose command line has this in it."""
    return next(process for process in psutil.Process(pid).parents() if name in " ".join(process.cmdline()))


def test_a_task_that_is_killed_ends_the_launch_with_its_node_named(spark_place, pids):
    def work():
        pids.write(f"rank-{os.environ['NODE_RANK']}")
        # What a rank has started ends too.
        pids.write("child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        time.sleep(600)

    launch = spark_place.launchable(work, num_accelerators=1).submit()
    pids.wait_for("child", 2, 180)
    above(pids.read("rank-1")[0], "pyspark.daemon").kill()  # the one that holds the agent, forked from the daemon
    error = launch.exception(120)
    assert isinstance(error, LaunchCancelledError), error
    assert "the agent of node 1 (" in str(error)
    pids.wait_for_end()


def agents_of(job):
    """Processes that run an agent of this job, or hold one."""
    return [process for process in psutil.process_iter(["cmdline"]) if job in (process.info["cmdline"] or ())]


def wait_for(condition, seconds=180):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_spark_does_not_start_the_tasks_again_by_itself(spark, cpu_only, tmp_path):
    (tmp_path / "logs").mkdir()
    # Agents that call a caller who is not there, for longer than this test takes.
    command = AgentCommand("nobody", 2, ("127.0.0.1:9",), "secret", tmp_path, {}, seconds=300, timeout=None)
    job = SparkEngine().spawn(command)
    agents = wait_for(lambda: len(found := agents_of("nobody")) == 4 and found)
    wait_for(lambda: job.state() == "running")
    above(agents[0].pid, "pyspark.daemon").kill()
    wait_for(lambda: job.state() == "ended")
    job.close(0)
    wait_for(lambda: not agents_of("nobody"))


def test_an_executor_that_is_gone_is_a_node_taken_away_and_the_launch_goes_on_in_another(spark_place, pids):
    def work():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        pids.write(f"attempt-{attempt}-{os.environ['NODE_RANK']}")
        if attempt == 0:
            time.sleep(600)
        return attempt

    launch = spark_place.launchable(work, num_accelerators=1, max_restarts=1).submit()
    pids.wait_for("attempt-0", 2, 180)
    above(pids.read("attempt-0-1")[0], "CoarseGrainedExecutorBackend").kill()
    assert launch.result(240) == [1, 1]
    pids.wait_for_end()


def code(name):
    """The first block of code below a heading of the page."""
    return re.search(rf"## {name}\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)


@pytest.mark.parametrize("name", [pytest.param("Before", marks=pytest.mark.slow), "After"])
def test_the_page_for_those_who_come_from_torch_distributor_is_true(spark_place, name):
    script = {"__name__": "__main__"}
    exec(code(name), script)
    losses = [script["result"]] if name == "Before" else script["result"]
    assert len(losses) == {"Before": 1, "After": 4}[name]
    assert max(losses) < 0.01
