"""What a rank returned or raised survives the way to the caller, or is told plainly."""

import pickle
import subprocess
import sys
import threading

import cloudpickle
import pytest
import torch

from airdist import RankError, RankExitError, ResultError
from airdist.outcome import Raised, Returned, read, write


class NeedsArgumentsError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code


class PrefixesError(Exception):
    """Comes back from a plain pickle with its message prefixed twice."""

    def __init__(self, what):
        super().__init__(f"failed: {what}")


def sent(outcome, tmp_path):
    path = tmp_path / "outcome.pkl"
    written = write(outcome, path, rank=1)
    assert not path.with_suffix(".part").exists()
    record, body = read(path, rank=1)
    assert record == written
    return record, body


def raised(error):
    with pytest.raises(type(error)) as caught:
        raise error
    return Raised(caught.value)


@pytest.mark.parametrize(
    "value", [None, 0, "x" * 20_000_000, {"a": [1, (2,)]}, lambda: 1], ids=lambda v: type(v).__name__
)
def test_values_come_back(tmp_path, value):
    record, body = sent(Returned(value), tmp_path)
    assert record.kind == "value"
    assert body() == 1 if callable(value) else body == value


def test_tensors_and_modules_come_back(tmp_path):
    model = torch.nn.Linear(2, 2)
    _, (tensor, back) = sent(Returned((torch.arange(3), model)), tmp_path)
    assert torch.equal(tensor, torch.arange(3))
    assert isinstance(back.weight, torch.nn.Parameter)
    assert torch.equal(back.weight, model.weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_device_arrive_in_host_memory(tmp_path):
    model = torch.nn.Linear(2, 2).cuda()
    _, (tensor, back) = sent(Returned((torch.arange(3).cuda(), model)), tmp_path)
    assert (tensor.device.type, back.weight.device.type, type(back.weight)) == ("cpu", "cpu", torch.nn.Parameter)
    assert torch.equal(back.weight, model.weight.cpu())


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        OSError(2, "No such file", "there"),
        NeedsArgumentsError(7, detail="why"),
        PrefixesError("x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_come_back_as_themselves(tmp_path, error):
    error.extra = {"kept": True}
    record, back = sent(raised(error), tmp_path)
    assert record.kind == "error"
    assert type(back) is type(error)
    assert (str(back), back.args, back.extra) == (str(error), error.args, {"kept": True})
    assert vars(back) == vars(error)


def test_a_class_of_main_comes_back_as_the_same_class(tmp_path):
    # Given a class that the caller has sent by value, as those of a notebook are.
    namespace = {"__name__": "__main__"}
    exec("class Mine(Exception): pass", namespace)
    mine = namespace["Mine"]
    sent_out = pickle.loads(cloudpickle.dumps(mine))
    _, back = sent(raised(sent_out("x")), tmp_path)
    assert type(back) is mine


def test_what_an_exception_carries_that_will_not_pickle_is_left_behind(tmp_path):
    error = ValueError("locked", threading.Lock())
    error.lock = threading.Lock()
    error.kept = 1
    _, back = sent(raised(error), tmp_path)
    assert type(back) is not RankError or "locked" in str(back)


def test_an_attribute_that_will_not_pickle_does_not_cost_the_type(tmp_path):
    error = NeedsArgumentsError(7, detail="why")
    error.lock = threading.Lock()
    _, back = sent(raised(error), tmp_path)
    assert type(back) is NeedsArgumentsError
    assert back.code == 7
    assert not hasattr(back, "lock")


def test_an_exception_that_will_not_go_at_all_has_a_stand_in(tmp_path):
    class UnpicklableError(Exception):
        lock = threading.Lock()

    record, back = sent(raised(UnpicklableError("the reason")), tmp_path)
    assert type(back) is RankError
    assert back.rank == 1
    assert back.type_name.endswith("UnpicklableError")
    assert "the reason" in str(back)
    assert "the reason" in record.traceback


def test_an_unpicklable_value_names_the_part_at_fault(tmp_path):
    record, back = sent(Returned({"model": [1, threading.Lock()]}), tmp_path)
    assert type(back) is ResultError
    assert "the value -> ['model'] -> [1] (type _thread.lock)" in str(back)
    assert record.kind == "error"


def test_a_value_that_pickles_and_does_not_load_is_found_in_the_rank(tmp_path):
    class Trap:
        def __reduce__(self):
            return (int, ("not a number",))

    _, back = sent(Returned(Trap()), tmp_path)
    assert type(back) is ResultError
    assert "not a number" in str(back)


def test_a_value_that_loads_in_the_rank_alone_is_an_error_and_not_a_hang(tmp_path):
    program = f"""
import sys, types
from pathlib import Path
module = types.ModuleType("only_there"); sys.modules["only_there"] = module
exec("class Thing: pass", module.__dict__)
from airdist.outcome import Returned, write
assert write(Returned(module.Thing()), Path({str(tmp_path / "v")!r}), rank=2).kind == "value"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    record, back = read(tmp_path / "v", rank=2)
    assert record.kind == "error"
    assert type(back) is ResultError
    assert "only_there" in str(back)


@pytest.mark.parametrize(("code", "kind"), [(None, "value"), (0, "value"), (3, "error"), ("bye", "error")])
def test_sys_exit_is_a_value_only_when_it_means_success(tmp_path, code, kind):
    record, back = sent(raised(SystemExit(code)), tmp_path)
    assert record.kind == kind
    if kind == "error":
        assert type(back) is RankExitError
        assert back.exit_code == (3 if code == 3 else 1)
        assert str(code) in str(back)


def test_a_rank_that_was_interrupted_does_not_interrupt_the_caller(tmp_path):
    _, back = sent(raised(KeyboardInterrupt()), tmp_path)
    assert type(back) is RankError
    assert back.type_name == "builtins.KeyboardInterrupt"


def test_the_traceback_shows_the_users_frames_and_the_chain(tmp_path):
    def function():
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        function()
    record, _ = sent(Raised(caught.value), tmp_path)
    assert "in function" in record.traceback
    assert "KeyError: 'first'" in record.traceback
    assert "direct cause" in record.traceback
    assert record.summary == "ValueError: second"
