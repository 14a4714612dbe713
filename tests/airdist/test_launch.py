"""A launch as its caller sees it: values, exceptions, output, the handle, and what stays on disk."""

import asyncio
import os
import pickle
import signal
import stat
import sys
import threading
import time

import pytest

from airdist import (
    DeviceError,
    LaunchCancelledError,
    LaunchError,
    PayloadError,
    RankDiedError,
    RankExitError,
    ResultError,
    Results,
    distributed,
)

two = distributed(num_accelerators=2, tracking=False, logs="none", grace_seconds=1)


@pytest.fixture(autouse=True)
def runs(cpu_world):
    return cpu_world


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and other.x == self.x

    def __hash__(self):
        return hash(self.x)


class MineError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code} {detail}")
        self.code = code


def test_hello_world_returns_the_ranks_in_order():
    @distributed(num_accelerators=4, tracking=False)
    def hello_world():
        from airdist import runtime

        return runtime.get_global_rank()

    results = hello_world.distributed()
    assert results == [0, 1, 2, 3]
    assert isinstance(results, list)
    assert repr(results).splitlines()[1:3] == ["  rank 0: 0", "  rank 1: 1"]


def test_every_rank_gets_the_same_arguments_and_classes_of_the_caller_work_both_ways():
    @two
    def function(point, *, factor):
        return Point(point.x * factor)

    assert list(function.distributed(Point(3), factor=2)) == [Point(6), Point(6)]


def test_the_old_names_launch_as_before():
    with pytest.warns(FutureWarning, match="gpus"):

        @distributed(gpus=2, tracking=False)
        def train():
            return 1

    assert list(train.distributed()) == [1, 1]
    with pytest.warns(FutureWarning, match="gpu_type"):
        typed = distributed(1, gpu_type="A10", tracking=False)(lambda: 1)
    with pytest.raises(DeviceError, match="A10"):
        typed.distributed()


def test_a_model_defined_outside_the_function_trains_with_ddp():
    torch = pytest.importorskip("torch")

    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

        def forward(self, x):
            return self.layers(x)

    @two
    def train(steps):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from airdist.runtime import get_global_rank

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(MLP())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(get_global_rank())
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(16, 4)
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.module.state_dict().items()}

    first, second = train.distributed(3)
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_large_value_comes_back():
    @two
    def large():
        return os.urandom(20_000_000)

    first, second = large.distributed()
    assert len(first) == len(second) == 20_000_000
    assert first != second


def test_the_original_exception_is_raised_with_everything_that_is_known():
    @two
    def fails():
        rank = int(os.environ["RANK"])
        if rank == 0:
            return "finished"
        print("last words")
        raise MineError(7, detail="why") from KeyError("before")

    with pytest.raises(MineError, match="7 why") as caught:
        fails.distributed()
    error = caught.value
    assert error.code == 7
    assert "rank 1 of 2" in error.__notes__[0]
    assert "last words" in error.__notes__[0]
    assert "in fails" in str(error.__cause__)
    assert "KeyError: 'before'" in str(error.__cause__)
    assert "airdist/rank.py" not in str(error.__cause__)
    assert error.launch.results in ({0: "finished"}, {})  # rank 0 may not have come to its end
    assert error.launch.failures[0].rank == 1
    log = error.launch.failures[0].log.read_text()
    assert log.startswith("last words\n")
    assert "MineError: 7 why" in log


def test_several_failures_are_all_told():
    @two
    def fails():
        raise ValueError(f"from {os.environ['RANK']}")

    with pytest.raises(ValueError, match=r"from [01]") as caught:
        fails.distributed()
    assert sorted(failure.summary for failure in caught.value.launch.failures) == [
        "ValueError: from 0",
        "ValueError: from 1",
    ]
    assert "also failed" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RankDiedError, "137.*out-of-memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), RankDiedError, "SIGSEGV"),
        (lambda: os._exit(0), RankExitError, "exit code 0 before the function returned"),
        (lambda: os._exit(5), RankExitError, "exit code 5"),
        (lambda: sys.exit(6), RankExitError, "exit code 6"),
        (threading.Lock, ResultError, r"the value \(type _thread.lock\)"),
    ],
    ids=["killed", "crashed", "os-exit-0", "os-exit-5", "sys-exit", "unpicklable"],
)
def test_other_ways_to_fail_are_put_in_words(how, error, words):
    with pytest.raises(error, match=words) as caught:
        distributed(num_accelerators=1, tracking=False, logs="none")(how).distributed()
    assert caught.value.rank == 0


def test_sys_exit_without_a_code_is_a_return():
    assert list(two(sys.exit).distributed()) == [None, None]


def test_nothing_starts_for_what_cannot_be_sent(runs):
    lock = threading.Lock()

    @two
    def captures():
        return lock

    with pytest.raises(PayloadError, match="closure variable 'lock'"):
        captures.distributed()
    assert not runs.exists()


def test_a_payload_that_does_not_load_in_the_rank_is_an_error_with_a_name():
    class Trap:
        def __reduce__(self):
            return (__import__, ("no_such_module",))

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        two(lambda _: None).distributed(Trap())


def test_output_is_displayed_with_the_rank_in_front_and_kept_whole_in_files(runs, capfd):
    @distributed(num_accelerators=2, tracking=False)
    def talks():
        rank = os.environ["RANK"]
        print(f"out {rank}")
        print(f"err {rank}", file=sys.stderr)

    talks.distributed()
    out, err = capfd.readouterr()
    assert "[rank 0] out 0\n" in out
    assert "[rank 1] out 1" not in out
    assert "1 lines of other ranks not shown" in out
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
    logs = {path.name: path.read_text() for path in runs.glob("*/logs/*")}
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    assert sorted(logs["rank-1.log"].splitlines()) == ["err 1", "out 1"]


def test_what_native_code_and_children_write_is_output_too(capfd):
    @distributed(num_accelerators=1, tracking=False)
    def talks():
        os.write(1, b"from the descriptor\n")
        os.system("echo from a child")

    talks.distributed()
    out = capfd.readouterr().out
    assert "from the descriptor\n" in out
    assert "from a child\n" in out


def test_all_lines_of_all_ranks_come_in_their_order(capfd):
    @distributed(num_accelerators=2, tracking=False, logs="all")
    def many():
        for index in range(5000):
            print(os.environ["RANK"], index)

    many.distributed()
    lines = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] {rank} {index}" for index in range(5000)
        ]


def test_logs_none_is_silent(capfd):
    two(lambda: print("x")).distributed()
    assert capfd.readouterr() == ("", "")


def test_a_run_directory_is_private_keeps_logs_and_loses_data_on_success(runs, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "do-not-write-me-down")

    launch = two(lambda: os.environ["MY_TOKEN"]).submit()
    assert list(launch.result(60)) == ["do-not-write-me-down"] * 2
    assert launch.run_dir.parent == runs
    assert stat.S_IMODE(launch.run_dir.stat().st_mode) == 0o700
    assert sorted(path.name for path in launch.run_dir.iterdir()) == ["logs"]


def test_secrets_of_the_environment_are_not_written_to_the_run_directory(runs, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "do-not-write-me-down")

    @two
    def fails():
        raise ValueError("so that everything is kept")

    with pytest.raises(ValueError, match="kept"):
        fails.with_overrides(env={"OTHER": "nor-me"}).distributed()
    kept = [path for path in runs.rglob("*") if path.is_file()]
    assert any(path.name == "payload.pkl" for path in kept)
    for path in kept:
        assert b"do-not-write-me-down" not in path.read_bytes()
        assert b"nor-me" not in path.read_bytes()


def test_a_run_directory_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AIRDIST_RUN_DIR", str(tmp_path / "file" / "runs"))
    with pytest.raises(LaunchError, match="AIRDIST_RUN_DIR names another"):
        two(lambda: None).distributed()


def test_the_caller_is_left_as_it_was(run_script):
    out = run_script(
        """
        import os, signal, sys, threading
        from airdist import distributed
        @distributed(num_accelerators=2, tracking=False, logs="none", env={"ADDED": "1"})
        def function():
            import torch
            return os.environ["ADDED"]
        before = {n: signal.getsignal(n) for n in signal.valid_signals()}, dict(os.environ), os.getcwd(), sys.path[:]
        descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        for _ in range(2):
            assert list(function.distributed()) == ["1", "1"]
        after = {n: signal.getsignal(n) for n in signal.valid_signals()}, dict(os.environ), os.getcwd(), sys.path[:]
        assert before == after
        assert "torch" not in sys.modules
        assert threading.active_count() == 1
        assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors
        print("same")
        """
    )
    assert out.strip() == "same"


def test_a_script_is_not_run_again_in_the_ranks_and_its_classes_can_be_caught(run_script):
    out = run_script(
        """
        print("script")
        from airdist import distributed
        class Mine(Exception):
            pass
        def helper():
            raise Mine("found")
        @distributed(num_accelerators=2, tracking=False, logs="none")
        def function():
            helper()
        try:
            function.distributed()
        except Mine as error:
            print("caught", error)
        """
    )
    assert out.split() == ["script", "caught", "found"]


def test_modules_beside_the_script_are_found(run_script, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    out = run_script(
        """
        import os, beside
        from airdist import distributed
        @distributed(num_accelerators=1, tracking=False, logs="none")
        def function():
            return beside.VALUE, os.getcwd()
        print(function.distributed()[0], os.getcwd())
        """
    )
    assert out.strip() == f"(3, '{tmp_path}') {tmp_path}"


def test_a_handle_tells_how_it_goes_and_gives_the_result(tmp_path):
    gate = tmp_path / "gate"
    launch = two(_wait_for).submit(str(gate))
    assert not launch.done()
    assert "running" in repr(launch)
    with pytest.raises(TimeoutError, match="it goes on"):
        launch.result(0.05)
    gate.touch()
    assert list(launch.result(60)) == ["opened", "opened"]
    assert launch.exception() is None
    assert launch.done()
    assert "finished" in repr(launch)
    assert launch.logs(1) == "waiting\n"
    assert not launch.cancel()
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        launch.logs(2)


def test_a_cancelled_launch_ends_and_says_so():
    launch = two(time.sleep).submit(600)
    assert launch.cancel()
    with pytest.raises(LaunchCancelledError, match="was cancelled"):
        launch.result(30)
    assert isinstance(launch.exception(), LaunchCancelledError)
    assert "failed" in repr(launch)


def test_launches_can_be_awaited_together():
    async def both():
        return await asyncio.gather(two(abs).submit(-1), two(abs).submit(-2))

    assert asyncio.run(both()) == [[1, 1], [2, 2]]


def test_a_launch_from_a_thread_works():
    found = []
    thread = threading.Thread(target=lambda: found.append(two(abs).distributed(-1)))
    thread.start()
    thread.join(60)
    assert found == [[1, 1]]


def test_results_are_a_list_that_prints_with_its_ranks():
    results = Results(["x" * 1000, None])
    assert results == ["x" * 1000, None]
    assert len(repr(results)) < 400
    assert repr(Results([5], ranks=[3])).endswith("rank 3: 5")
    assert pickle.loads(pickle.dumps(results)) == results


def test_a_launch_is_one_mlflow_run_whose_status_is_its_outcome(run_script, tmp_path):
    out = run_script(
        """
        from airdist import distributed
        @distributed(num_accelerators=2)
        def train(fail):
            import mlflow
            mlflow.log_metric("loss", 0.5)
            if fail:
                raise ValueError("x")
        train.distributed(False)
        try:
            train.distributed(True)
        except ValueError:
            pass
        import mlflow
        for run in mlflow.search_runs(output_format="list"):
            print("RUN", run.info.run_name, run.info.status, run.data.metrics["loss"])
        """,
        MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db",
        MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING="false",
    )
    assert sorted(line for line in out.splitlines() if line.startswith("RUN")) == [
        "RUN train FAILED 0.5",
        "RUN train FINISHED 0.5",
    ]
    assert "MLflow run:" in out


def _wait_for(path):
    print("waiting")
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return "opened"
