"""Inside a rank: its environment, its imports, its store, and how it leaves."""

import gc
import os
import pickle
import sys
import time

import pytest

from airdist import NestedLaunchError, distributed
from airdist.environ import LOOPBACK, launch_environ, rank_environ
from airdist.world import Place

two = distributed(num_accelerators=2, tracking=False, logs="none")


@pytest.fixture(autouse=True)
def runs(cpu_world):
    return cpu_world


def _environ():
    return dict(os.environ)


def test_ranks_find_the_environment_that_torchrun_gives():
    first, second = two(_environ).distributed()
    for rank, environ in enumerate((first, second)):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        assert {name: environ[name] for name in expected} == {name: str(value) for name, value in expected.items()}
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_the_garbage_collector_works_in_a_rank_although_its_start_goes_without():
    assert two(gc.isenabled).distributed() == [True, True]


def test_the_callers_environment_is_taken_at_the_call_and_additions_win(monkeypatch):
    function = two(_environ).with_overrides(env={"BOTH": "mine", "OMP_NUM_THREADS": "7"})
    monkeypatch.setenv("LATE", "set after decoration")
    monkeypatch.setenv("BOTH", "theirs")
    found = function.distributed()[1]
    assert (found["LATE"], found["BOTH"], found["OMP_NUM_THREADS"]) == ("set after decoration", "mine", "7")


def test_what_belongs_to_an_outer_job_or_to_the_front_end_stays_behind():
    caller = {
        "KEPT": "1",
        "RANK": "5",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "JPY_PARENT_PID": "1",
        "COLUMNS": "80",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    environ = launch_environ(caller, overrides={}, nprocs=1, visible="0,1")
    assert environ["KEPT"] == "1"
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
    alone = launch_environ({}, overrides={}, nprocs=1, visible=None, interface=LOOPBACK)["GLOO_SOCKET_IFNAME"]
    assert alone == ("lo" if sys.platform == "linux" else "lo0")
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not set(environ) & {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "JPY_PARENT_PID", "COLUMNS", "MPLBACKEND"}
    assert "OMP_NUM_THREADS" not in environ
    assert launch_environ({"MPLBACKEND": "agg"}, overrides={}, nprocs=1, visible=None)["MPLBACKEND"] == "agg"


def test_several_ranks_share_the_processors():
    share = int(launch_environ({}, overrides={}, nprocs=2, visible=None)["OMP_NUM_THREADS"])
    assert 1 <= share <= max(1, (os.cpu_count() or 1) // 2)
    assert launch_environ({"OMP_NUM_THREADS": "9"}, overrides={}, nprocs=2, visible=None)["OMP_NUM_THREADS"] == "9"


def test_a_rank_with_a_mask_of_its_own_sees_that():
    place = Place(attempt=2, node=1, nodes=3, first=4, world_size=9, address=("h", 1))
    environ = rank_environ(
        local_rank=1, nprocs=2, place=place, launch_dir="/runs/y", job="x", max_restarts=3, visible="MIG-b"
    )
    assert [environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")] == ["5", "1", "9", "1"]
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    assert environ["TORCHELASTIC_RUN_ID"] == "x"
    assert environ["TORCHELASTIC_RESTART_COUNT"] == "2"


def test_a_rank_loads_no_torch_that_the_function_does_not_need():
    def loaded():
        return [name for name in ("torch", "mlflow", "numpy") if name in sys.modules]

    assert list(two(loaded).distributed()) == [[], []]


def test_the_store_is_there_before_any_process_group_and_outlives_rank_zeros_function():
    def function():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.destroy_process_group()
            return "left early"
        # When rank 0 has returned long before, its store still answers.
        store = dist.distributed_c10d._get_default_store()
        for index in range(200):
            store.set(f"key{index}", "x")
        return store.get("key199")

    assert list(two(function).distributed()) == ["left early", b"x"]


def test_a_launch_inside_a_rank_is_refused():
    inner = distributed(num_accelerators=1)(abs)

    def outer():
        return inner.distributed(-1)

    with pytest.raises(NestedLaunchError):
        two(outer).distributed()


def test_arguments_of_the_program_are_those_of_the_caller(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    assert two(lambda: sys.argv).distributed()[0] == ["train.py", "--fast"]


def test_plain_pickle_knows_the_classes_of_main(run_script):
    out = run_script(
        """
        import pickle
        from airdist import distributed
        class Config:
            rate = 3
        @distributed(num_accelerators=1, tracking=False, logs="none")
        def function():
            return pickle.loads(pickle.dumps(Config())).rate
        print(function.distributed()[0])
        """
    )
    assert out.strip() == "3"


def test_a_rank_flushes_and_runs_exit_handlers_before_it_leaves(tmp_path):
    def function(path):
        import atexit

        sys.stdout.reconfigure(line_buffering=False, write_through=False)
        sys.stdout.write("not flushed by the function")
        file = open(path, "a")  # noqa: SIM115 - the exit handler closes it
        atexit.register(lambda: (file.write("exit handler\n"), file.close()))

    launch = two(function).submit(str(tmp_path / "exits"))
    launch.result(60)
    assert (tmp_path / "exits").read_text() == "exit handler\n" * 2
    assert launch.logs(1) == "not flushed by the function"


def test_a_crash_after_the_value_was_delivered_costs_nothing():
    def function():
        import atexit

        atexit.register(os.abort)
        return pickle.dumps(1)

    assert list(two(function).distributed()) == [pickle.dumps(1)] * 2


def test_the_function_runs_in_the_main_thread_with_usual_signal_handlers():
    def function():
        import signal
        import threading

        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return threading.current_thread() is threading.main_thread(), usual, signal.getsignal(signal.SIGTERM)

    import signal

    assert list(two(function).distributed()) == [(True, True, signal.SIG_DFL)] * 2


def test_a_bare_launch_takes_well_under_the_time_of_an_import_of_torch():
    started = time.monotonic()
    two(abs).distributed(-1)
    assert time.monotonic() - started < 5
