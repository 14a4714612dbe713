"""What was given up on a mount that does not answer changes nothing later, or the error says that it may."""

from __future__ import annotations

import os
import pickle
import threading
import time

import pytest

from airdata.errors import OutcomeUnknownError, TransferError
from airdata.transport import local
from airdata.transport.local import LocalTransport
from airdata.transport.patience import Abandoned, Wanted, within
from airdata.transport.retry import Retry
from airdata.volume import Volume

DEADLINE = 60


def as_mount(directory, seconds):
    """A directory whose verbs are given up as those of a mount are."""
    transport = LocalTransport(Volume.of(directory), Retry(deadline=seconds))
    transport._on_network = True
    return transport


def join_abandoned():
    for thread in threading.enumerate():
        if thread.name == "airdata-mount":
            thread.join(DEADLINE)
            assert not thread.is_alive()


@pytest.fixture
def block(monkeypatch):
    """Make a function of ``os`` wait, as in a kernel whose server has gone away; returns what ends the wait."""
    awake = threading.Event()

    def install(name):
        real = getattr(os, name)

        def waits(*args, **kwargs):
            if threading.current_thread().name == "airdata-mount":
                assert awake.wait(DEADLINE)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, waits)
        return awake

    yield install
    awake.set()
    join_abandoned()


@pytest.fixture
def pipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipe") / "pipe"
    os.mkfifo(path)
    return path


def test_a_put_that_was_given_up_before_its_last_step_never_replaces_the_file(tmp_path, pipe):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(TransferError, match="nothing has moved for 1 s") as caught:
        as_mount(tmp_path, 1).put("a", pipe)
    assert not isinstance(caught.value, OutcomeUnknownError), "the old file stays, and that is known"
    pipe.write_bytes(b"")  # the source answers at last
    join_abandoned()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(("verb", "function"), [("put", "replace"), ("delete", "unlink")])
def test_a_change_that_the_kernel_may_yet_carry_out_has_an_unknown_outcome(verb, function, block, tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    awake = block(function)
    transport = as_mount(tmp_path, 1)
    with pytest.raises(OutcomeUnknownError, match=r"a: nothing has moved for 1 s.*may yet be carried out"):
        transport.put("a", b"new") if verb == "put" else transport.delete("a")
    assert (tmp_path / "a").read_bytes() == b"old"
    awake.set()
    join_abandoned()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([b"new"] if verb == "put" else [])


def test_an_overwrite_that_was_given_up_has_an_unknown_outcome_and_writes_no_more(pipe):
    with pytest.raises(OutcomeUnknownError):
        within(1, "writing", local._Upload(os.fspath(pipe), b"new").write_and_compare, lambda: 0)
    # Opening the pipe lets the writer's own open, which blocks in the kernel, return.
    assert pipe.read_bytes() == b""
    join_abandoned()


def test_a_put_that_takes_longer_than_the_deadline_goes_on_while_bytes_flow(tmp_path, pipe):
    def feed():
        with pipe.open("wb") as target:
            for _ in range(8):
                target.write(b"x" * (1 << 20))
                target.flush()
                time.sleep(0.4)  # a slow source

    feeder = threading.Thread(target=feed)
    feeder.start()
    as_mount(tmp_path, 2).put("a", pipe)
    feeder.join(DEADLINE)
    assert (tmp_path / "a").stat().st_size == 8 << 20


def test_no_act_begins_once_it_was_given_up():
    wanted, done = Wanted(), []
    wanted.commit(lambda: done.append("before"))
    assert wanted.give_up()
    with pytest.raises(Abandoned):
        wanted.commit(lambda: done.append("after"))
    assert done == ["before"]


def test_an_unknown_outcome_reaches_other_processes_as_such():
    error = pickle.loads(pickle.dumps(OutcomeUnknownError(110, "why")))
    assert isinstance(error, OutcomeUnknownError)
    assert str(error) == "[Errno 110] why"
