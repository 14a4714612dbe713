"""Locks on bytes of one file: they exclude threads and processes, and die with their owner."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from airdata.cache.locks import LockFile, locks_exclude, wait_for


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "locks")


def in_child(body: Callable[[], bool]) -> bool:
    """Run ``body`` in a forked child and return its answer."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if body() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, 1}, "the child failed"
    return code == 0


def test_this_filesystem_has_locks_that_exclude(path: str) -> None:
    assert locks_exclude(path)


def test_an_exclusive_lock_keeps_out_another_description(path: str) -> None:
    one, other = LockFile(path), LockFile(path)
    assert one.exclude(5)
    assert not other.exclude(5)
    assert not other.share(5)
    assert other.exclude(6)
    one.release(5)
    assert other.exclude(5)


def test_an_exclusive_lock_keeps_out_another_thread_of_the_same_description(path: str) -> None:
    locks = LockFile(path)
    assert locks.exclude(5)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.extend([locks.exclude(5), locks.share(5)]))
    thread.start()
    thread.join()
    assert answers == [False, False]


def test_shared_locks_count_and_the_last_release_lets_a_remover_in(path: str) -> None:
    reader, remover = LockFile(path), LockFile(path)
    assert reader.share(5)
    assert reader.share(5)
    reader.release(5)
    assert not remover.exclude(5)
    reader.release(5)
    assert remover.exclude(5)
    assert not reader.share(5)


def test_a_downgrade_lets_readers_in_and_removers_not(path: str) -> None:
    one, other = LockFile(path), LockFile(path)
    assert one.exclude(5)
    one.downgrade(5)
    assert other.share(5)
    other.release(5)
    assert not other.exclude(5)


def test_a_forked_child_neither_owns_nor_keeps_its_parents_locks(path: str) -> None:
    parent = LockFile(path)
    assert parent.exclude(5)
    assert in_child(lambda: not LockFile(path).exclude(5))

    def inherited_copy_is_closed() -> bool:
        with pytest.raises(ValueError, match="before a fork"):
            parent.exclude(6)
        return True

    assert in_child(inherited_copy_is_closed)
    assert not LockFile(path).exclude(5), "the child's end released its parent's lock"

    # The parent lets go while a child that was forked before lives on.
    gate_read, gate_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(gate_write)
        os.read(gate_read, 1)
        os._exit(0)
    parent.close()
    assert wait_for(lambda: LockFile(path).exclude(5), deadline(30))
    os.close(gate_write)
    os.waitpid(pid, 0)
    os.close(gate_read)


def deadline(seconds: float) -> Callable[[], bool]:
    import time

    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def test_a_killed_owner_holds_nothing(path: str) -> None:
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        locks = LockFile(path)
        os.write(ready_write, b"1" if locks.exclude(5) else b"0")
        signal.pause()
        os._exit(1)
    assert os.read(ready_read, 1) == b"1"
    locks = LockFile(path)
    assert not locks.exclude(5)
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: locks.exclude(5), deadline(30))
    os.waitpid(pid, 0)


def test_waiting_ends_when_it_is_pointless(path: str) -> None:
    one, other = LockFile(path), LockFile(path)
    assert one.exclude(5)
    tries = iter(range(3))
    assert not wait_for(lambda: other.exclude(5), lambda: next(tries, None) is not None)


def test_a_removed_lock_file_is_noticed(path: str) -> None:
    locks = LockFile(path)
    assert locks.is_current()
    os.unlink(path)
    assert not locks.is_current()
    LockFile(path)
    assert not locks.is_current()


def test_a_private_lock_file_excludes_within_the_process(path: str) -> None:
    locks = LockFile(path, kernel=False)
    assert locks.exclude(5)
    assert not locks.share(5)
    locks.release(5)
    assert locks.share(5)


def test_a_link_in_place_of_the_lock_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "locks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        LockFile(str(tmp_path / "locks"))
