"""What a launch is on every engine: the same results, errors, ends, tracking, data and checkpoints.

Each test has four ranks: on two nodes where the engine has nodes, on this machine otherwise.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from airdist import AgentDiedError, DistributedTimeoutError, NodeLostError, RankDiedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs process descriptors and /proc of Linux")


class TooWarmError(Exception):
    """An exception that only this module knows."""


def facts():
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID".split()
    return {name: os.environ[name] for name in names} | {"dir": os.environ["AIRDIST_LAUNCH_DIR"]}


def test_every_value_comes_back_in_rank_order_and_every_rank_knows_its_place(place):
    def work(factor):
        print("rank", os.environ["RANK"], "speaks")
        return facts() | {"value": b"x" * (factor * (1 + int(os.environ["RANK"])))}

    launch = place.launchable(work).submit(1 << 20)
    results = launch.result(120)
    assert [len(result["value"]) for result in results] == [1 << 20, 2 << 20, 3 << 20, 4 << 20]
    assert [result["RANK"] for result in results] == list("0123")
    each = 4 // place.nodes
    assert [int(result["NODE_RANK"]) for result in results] == [rank // each for rank in range(4)]
    assert [int(result["LOCAL_RANK"]) for result in results] == [rank % each for rank in range(4)]
    assert {result["WORLD_SIZE"] for result in results} == {"4"}
    assert {result["LOCAL_WORLD_SIZE"] for result in results} == {str(each)}
    assert len({(result["MASTER_ADDR"], result["MASTER_PORT"]) for result in results}) == 1
    assert {result["TORCHELASTIC_RUN_ID"] for result in results} == {launch.run_dir.name}
    assert len({result["dir"] for result in results}) == place.nodes
    assert [launch.logs(rank) for rank in range(4)] == [f"rank {rank} speaks\n" for rank in range(4)]


def test_the_original_exception_comes_back_and_ends_all_nodes(place, pids):
    def work():
        pids.write("rank")
        if os.environ["RANK"] == "3":
            pids.wait_for("rank", 4)
            print("it is getting warm", flush=True)
            raise TooWarmError(42)
        time.sleep(600)

    with pytest.raises(TooWarmError) as caught:
        place.launchable(work).distributed()
    assert caught.value.args == (42,)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 3 of 4 on " in notes
    assert "it is getting warm" in notes
    assert "raise TooWarmError(42)" in str(caught.value.__cause__)
    pids.wait_for_end()


def test_a_killed_rank_ends_all_nodes_and_is_named(place, pids):
    def work():
        pids.write("rank")
        if os.environ["RANK"] == "2":
            pids.wait_for("rank", 4)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RankDiedError, match="rank 2 was ended by SIGKILL") as caught:
        place.launchable(work).distributed()
    assert (caught.value.rank, caught.value.signal) == (2, signal.SIGKILL)
    pids.wait_for_end()


@pytest.mark.parametrize("node", [0, -1], ids=["first", "last"])
def test_a_killed_agent_is_named_and_leaves_no_process(place, pids, node):
    def work():
        pids.write(f"agent-{os.environ['NODE_RANK']}", os.getppid())
        pids.write("rank")
        time.sleep(600)

    launch = place.launchable(work).submit()
    pids.wait_for("rank", 4)
    last = place.nodes - 1 if node else 0
    os.kill(pids.read(f"agent-{last}")[0], signal.SIGKILL)
    error = launch.exception(60)
    if last == 0:
        assert isinstance(error, AgentDiedError), error
    else:
        assert isinstance(error, NodeLostError), error
        assert error.node == last
        assert f"node {last} (" in str(error)
    pids.wait_for_end()


def test_the_death_of_the_caller_ends_all_nodes(place, pids, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys, time
        from airdist import distributed
        def work():
            with open({pids.path!r}, "a") as file:
                file.write(f"agent {{os.getppid()}}\\nrank {{os.getpid()}}\\n")
            time.sleep(600)
        if __name__ == "__main__":
            {place.prelude}
            distributed(**{ {**place.settings, "tracking": False}!r})(work).distributed()
        """)
    )
    caller = subprocess.Popen([sys.executable, str(script)], env={**os.environ, **place.environ}, cwd=tmp_path)
    pids.wait_for("rank", 4, 150)
    caller.kill()
    caller.wait()
    pids.wait_for_end()


def test_a_time_out_brings_the_stacks_of_every_rank(place, pids):
    def work():
        pids.write("rank")
        wait_for_godot()

    def wait_for_godot():
        time.sleep(600)

    with pytest.raises(DistributedTimeoutError) as caught:
        place.launchable(work, timeout=6).distributed()
    assert len(pids.read("rank")) == 4
    assert sorted(caught.value.stacks) == [0, 1, 2, 3]
    assert all("wait_for_godot" in stack for stack in caught.value.stacks.values()), caught.value.stacks
    pids.wait_for_end()


def test_the_run_of_mlflow_has_what_every_rank_logged(place):
    import mlflow

    def work():
        import mlflow

        mlflow.log_metric(f"rank_{os.environ['RANK']}", 1.0)

    place.launchable(work, tracking=True, name="tracked").distributed()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FINISHED"
    assert {f"rank_{rank}" for rank in range(4)} <= set(run.data.metrics)
    assert run.data.tags["airdist.world_size"] == "4"
    client = mlflow.MlflowClient()
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id, "logs")} <= {
        *(f"logs/rank-{rank}.log" for rank in range(4)),
        "logs/agent.log",
    }


def test_data_is_fetched_once_per_node_and_a_checkpoint_of_four_ranks_is_published_once(
    place, s3_endpoint, make_files, tmp_path
):
    from tests.faults.proxy import FaultProxy

    contents = make_files(tmp_path / "files", 12)
    options = {"key": "test", "secret": "test"}
    bucket = f"engines-{os.getpid()}-{time.monotonic_ns()}"
    upload(s3_endpoint, bucket, tmp_path / "files", contents)
    proxy = FaultProxy.start(s3_endpoint.removeprefix("http://"))

    def work(root, endpoint, checkpoint):
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

        import airdata

        os.environ["AIRDATA_CACHE_DIR"] = f"{root}/cache-of-node-{os.environ['NODE_RANK']}"
        dist.init_process_group("gloo")
        dataset = airdata.UCVolumeDataset(
            f"s3://{bucket}", storage_options={**options, "endpoint_url": endpoint}, prefetch=4
        )
        mine = ["/".join(path.split("/")[-2:]) for path in dataset]
        dist.barrier()
        grouped = airdata.UCVolumeDataset(
            f"s3://{bucket}",
            storage_options={**options, "endpoint_url": endpoint},
            shuffle=True,
            shuffle_scope="group",
            cache_dir=f"{root}/share-of-node-{os.environ['NODE_RANK']}",
        )
        shares = []
        for epoch in range(2):
            grouped.set_epoch(epoch)
            shares.append([(int(os.environ["NODE_RANK"]), "/".join(path.split("/")[-2:])) for path in grouped])
            dist.barrier()
        shard = torch.full((3,), float(dist.get_rank()))
        state = {"weight": DTensor.from_local(shard, init_device_mesh("cpu", (4,)), [Shard(0)])}
        dcp.save(state, storage_writer=airdata.UCVolumeWriter(checkpoint))
        loaded = None
        three = dist.new_group([0, 1, 2])
        mesh = DeviceMesh("cpu", [0, 1, 2])
        if dist.get_rank() < 3:
            weight = distribute_tensor(torch.full((12,), -1.0), mesh, [Shard(0)])
            dcp.load({"weight": weight}, storage_reader=airdata.UCVolumeReader(checkpoint), process_group=three)
            loaded = weight.full_tensor().tolist()
        dist.barrier()
        return mine, shares, loaded

    try:
        results = place.launchable(work).distributed(str(tmp_path), proxy.url, str(tmp_path / "checkpoint"))
        fetched = [path for _, path, status in proxy.requests("GET", ".bin") if status in (200, 206)]
    finally:
        proxy.stop()
    assert sorted(name for mine, *_ in results for name in mine) == sorted(contents)
    first, second = (sorted(pair for _, shares, _ in results for pair in shares[epoch]) for epoch in range(2))
    assert first == second  # a file stays with its node
    assert sorted(name for _, name in first) == sorted(contents)
    assert len(fetched) == 2 * len(contents)  # once for all, and once by shares in two epochs
    assert len(list(tmp_path.glob("cache-of-node-*"))) == place.nodes
    whole = [float(rank) for rank in range(4) for _ in range(3)]
    assert [loaded for *_, loaded in results] == [whole, whole, whole, None]
    assert load_alone(tmp_path / "checkpoint") == whole


def load_alone(checkpoint):
    import torch
    import torch.distributed.checkpoint as dcp

    import airdata

    weight = torch.full((12,), -1.0)
    dcp.load({"weight": weight}, storage_reader=airdata.UCVolumeReader(str(checkpoint)), no_dist=True)
    return weight.tolist()


def upload(endpoint, bucket, folder, contents):
    from s3fs import S3FileSystem

    files = S3FileSystem(key="test", secret="test", endpoint_url=endpoint, skip_instance_cache=True)
    files.mkdir(bucket)
    for name in contents:
        files.put(str(folder / name), f"{bucket}/{name}")
