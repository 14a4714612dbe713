"""What `distributed` makes of a function, before anything is launched."""

import pickle
import warnings

import pytest

from airdist import DistributedFunction, LaunchError, NestedLaunchError, distributed
from airdist.devices import AcceleratorType

pytestmark = pytest.mark.usefixtures("cpu_world")


def add(a, b=2):
    """Add."""
    return a + b


@distributed(num_accelerators=2, tracking=False)
def decorated(a):
    return a


@pytest.mark.parametrize("decorate", [distributed, distributed(), distributed(num_accelerators=4), distributed(4)])
def test_an_ordinary_call_is_an_ordinary_call(decorate):
    function = decorate(add)
    assert isinstance(function, DistributedFunction)
    assert function(1) == 3
    assert function(1, b=5) == 6
    assert (function.__name__, function.__doc__, function.__wrapped__) == ("add", "Add.", add)


def test_the_repr_says_what_it_is_and_how_to_use_it():
    text = repr(distributed(num_accelerators=2, env={"TOKEN": "secret"})(add))
    assert "num_accelerators=2" in text
    assert "add(a, b=2)" in text
    assert "add.distributed(...)" in text
    assert "TOKEN" in text
    assert "secret" not in text


def test_overrides_make_another_function_and_leave_the_first():
    first = distributed(num_accelerators=2)(add)
    second = first.with_overrides(timeout=5, logs="none")
    assert (first.settings.timeout, second.settings.timeout) == (10_800, 5)
    assert second.settings.num_accelerators == 2
    assert second(1) == 3
    with pytest.raises(TypeError, match="no such setting: gpu_count"):
        first.with_overrides(gpu_count=1)


@pytest.mark.parametrize(
    ("old", "setting", "value"),
    [
        ({"gpus": 3}, "num_accelerators", 3),
        ({"gpu_type": "a10"}, "accelerator_type", "a10"),
        ({"remote": True}, "remote", True),
    ],
)
def test_old_names_work_and_warn_at_the_line_that_uses_them(old, setting, value):
    with pytest.warns(FutureWarning, match=f"{next(iter(old))} is the old name") as caught:
        function = distributed(**old)(add)
    assert getattr(function.settings, setting) == value
    assert caught[0].filename == __file__


def test_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed(num_accelerators=1, accelerator_type=AcceleratorType.GPU_8xH100)(add)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_accelerators": 0}, ValueError, "num_accelerators=0"),
        ({"num_accelerators": 1.5}, TypeError, "whole number"),
        ({"num_accelerators": True}, TypeError, "whole number"),
        ({"num_accelerators": 2, "gpus": 2}, ValueError, "num_accelerators alone"),
        ({"accelerator_type": "H100", "gpu_type": "H100"}, ValueError, "accelerator_type alone"),
        ({"accelerator_type": "a toaster"}, ValueError, "GPU_1xA10"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": "3h"}, TypeError, "number of seconds"),
        ({"grace_seconds": -1}, ValueError, "grace_seconds=-1"),
        ({"nodes": 0}, ValueError, "nodes=0"),
        ({"max_restarts": -1}, ValueError, "max_restarts=-1"),
        ({"logs": "loud"}, ValueError, "'rank0'"),
        ({"env": {"A": 1}}, TypeError, "'A'"),
        ({"env": ["A=1"]}, TypeError, "mapping"),
    ],
)
def test_a_wrong_argument_is_refused_at_decoration(arguments, error, words):
    with pytest.raises(error, match=words):
        distributed(**arguments)


def test_functions_that_return_no_plain_value_are_refused():
    async def coroutine():
        pass

    def generator():
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="coroutine or generator"):
            distributed(function)
    with pytest.raises(TypeError, match="goes around a function"):
        distributed()("a string")


@pytest.mark.parametrize("call", ["distributed", "submit"])
def test_arguments_are_checked_against_the_signature_before_anything_starts(cpu_world, call):
    function = distributed(add)
    with pytest.raises(TypeError, match=r"add\(a, b=2\): missing a required argument: 'a'"):
        getattr(function, call)()
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        getattr(function, call)(1, c=2)
    assert not cpu_world.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"engine": "pbs"}, "engine='pbs' does not exist; there is 'local', "),
        ({"engine_options": {"partition": "gpu"}}, "engine='local' has none"),
        ({"nodes": 2}, "this machine only"),
        ({"remote": True}, "no engine that reaches them"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_reaches_past_this_machine_is_an_error_that_says_what_there_is(cpu_world, arguments, words):
    with pytest.raises(LaunchError, match=words):
        distributed(**arguments)(add).distributed(1)
    assert not cpu_world.exists()


def test_the_engine_of_the_environment_is_read_at_the_call(monkeypatch):
    function = distributed(add)
    monkeypatch.setenv("AIRDIST_ENGINE", "pbs")
    with pytest.raises(LaunchError, match="'pbs'"):
        function.distributed(1)


def test_a_launch_inside_a_rank_is_refused(monkeypatch):
    monkeypatch.setenv("AIRDIST_LAUNCH_DIR", "/somewhere")
    for call in (decorated.distributed, decorated.submit):
        with pytest.raises(NestedLaunchError, match="call the function itself"):
            call(1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_an_outer_world_is_an_error(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(LaunchError, match=f"{name}=1 is set without the other"):
        decorated.distributed(1)


def test_an_outer_world_of_another_size_than_asked_for_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(LaunchError, match="2 processes are asked for"):
        decorated.distributed(1)


def test_in_an_outer_world_the_function_runs_in_place(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    marker = []
    results = distributed(marker.append).distributed("here")
    assert (marker, list(results), results.ranks) == (["here"], [None], (3,))
    with pytest.raises(LaunchError, match=r"use \.distributed"):
        distributed(add).submit(1)


def test_under_torchrun_every_rank_gets_the_list_by_rank(run_script, tmp_path):
    out = run_script(
        """
        import torch.distributed as dist
        from airdist import distributed, runtime

        @distributed(num_accelerators=2)
        def train():
            dist.init_process_group("gloo")
            return runtime.get_global_rank() * 10

        results = list(train.distributed())
        print(results, flush=True)
        dist.destroy_process_group()
        """,
        argv=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "script.py")),
    )
    assert out.count("[0, 10]") == 2


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @distributed(num_accelerators=2, tracking=False, logs="none")
    def train(self, steps):
        return self.rate * steps


def test_a_method_is_launched_with_its_object():
    trainer = Trainer(3)
    assert trainer.train(2) == 6
    assert list(trainer.train.distributed(2)) == [6, 6]


def test_a_decorated_function_pickles_as_its_name_where_that_finds_it():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
