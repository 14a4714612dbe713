"""Prefetching: the order of the plan, its limits, errors, the watchdog, and the end."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.cache import CachedFile
from airdata.cache.transit import in_transit
from airdata.errors import StalledError
from airdata.metrics import Counters
from airdata.prefetch import Prefetcher
from airdata.reading import fetches_at_once
from airdata.transport import FileInfo


class Source:
    """Files that arrive when the test says so; counts what is out and what was given back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started: list[str] = []
        self.released: list[str] = []
        self.finished: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def hold(self, *paths: str) -> None:
        for path in paths:
            self.gates[path] = threading.Event()

    def fetch(self, file: FileInfo) -> CachedFile:
        with self.lock:
            self.started.append(file.path)
        if file.path in self.gates:
            assert self.gates[file.path].wait(60)
        if file.path.startswith("bad"):
            raise OSError(f"cannot read {file.path}")
        with self.lock:
            self.finished.append(file.path)
        return CachedFile(
            f"/local/{file.path}", file.size, hit=False, on_release=lambda: self.released.append(file.path)
        )


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    for gate in source.gates.values():
        gate.set()


def plan(*paths: str, size: int = 10) -> list[tuple[int, FileInfo]]:
    return [(number, FileInfo(path, size, "v")) for number, path in enumerate(paths)]


def prefetcher(
    items, source: Source, *, max_files: int = 4, max_bytes: int = 1 << 20, timeout: float = 60, **more
) -> Prefetcher[int]:
    return Prefetcher(items, source.fetch, max_files=max_files, max_bytes=max_bytes, timeout=timeout, **more)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


def settled(source: Source) -> int:
    """The number of fetches that were started, once it stays the same for a while."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 0.3:
        if len(source.started) != count:
            count, since = len(source.started), time.monotonic()
        time.sleep(0.01)
    return count


@given(
    sizes=st.lists(st.integers(0, 50), max_size=40),
    max_files=st.integers(1, 9),
    max_bytes=st.integers(1, 100),
)
def test_every_item_comes_once_and_in_order(sizes: list[int], max_files: int, max_bytes: int) -> None:
    items = [(number, FileInfo(f"f{number}", size)) for number, size in enumerate(sizes)]
    out = list(prefetcher(items, Source(), max_files=max_files, max_bytes=max_bytes))
    assert [(number, file) for number, file, _ in out] == items
    assert all(isinstance(lease, CachedFile) and lease.local_path == f"/local/{file.path}" for _, file, lease in out)


def test_files_that_arrive_out_of_order_are_delivered_in_order(source) -> None:
    source.hold("a")
    items = iter(prefetcher(plan("a", "b", "c"), source))
    opener = threading.Thread(
        target=lambda: (until(lambda: {"b", "c"} <= set(source.finished)), source.gates["a"].set())
    )
    opener.start()
    assert [file.path for _, file, _ in items] == ["a", "b", "c"]
    opener.join()


def test_the_line_ends_four_times_max_files_ahead_of_the_consumer(source) -> None:
    names = [f"f{n}" for n in range(30)]
    items = iter(prefetcher(plan(*names), source, max_files=4))
    next(items)
    # One is delivered; four times four may be under way or wait for the consumer.
    assert settled(source) == 17
    rest = [file.path for _, file, _ in items]
    assert rest == names[1:]


def test_fetches_run_side_by_side_up_to_max_files(source) -> None:
    names = [f"f{n}" for n in range(8)]
    source.hold(*names)
    items = iter(prefetcher(plan(*names), source, max_files=4))
    consumer = threading.Thread(target=lambda: list(items))
    consumer.start()
    until(lambda: len(source.started) == 4)
    assert settled(source) == 4
    for gate in source.gates.values():
        gate.set()
    consumer.join(60)
    assert not consumer.is_alive()


def test_no_more_than_max_bytes_are_in_flight_and_a_larger_file_goes_alone(source) -> None:
    items = [(0, FileInfo("a", 60)), (1, FileInfo("b", 60)), (2, FileInfo("huge", 1000)), (3, FileInfo("c", 10))]
    source.hold("a", "b", "huge")
    iterator = iter(prefetcher(items, source, max_bytes=100))
    out: list[str] = []
    consumer = threading.Thread(target=lambda: out.extend(file.path for _, file, _ in iterator))
    consumer.start()
    until(lambda: source.started == ["a"])
    assert settled(source) == 1
    source.gates["a"].set()
    until(lambda: source.started == ["a", "b"])
    assert settled(source) == 2
    source.gates["b"].set()
    until(lambda: source.started == ["a", "b", "huge"])
    assert settled(source) == 3
    source.gates["huge"].set()
    consumer.join(60)
    assert out == ["a", "b", "huge", "c"]


def here(*paths: str) -> Callable[[FileInfo], CachedFile | None]:
    """A cache that holds these files."""
    return lambda file: CachedFile(f"/cache/{file.path}", file.size, hit=True) if file.path in paths else None


def test_what_is_on_local_disk_already_needs_no_thread(source) -> None:
    names = [f"f{n}" for n in range(300)]
    before = threading.active_count()
    for number, (_, file, lease) in enumerate(prefetcher(plan(*names), source, max_files=64, find=here(*names))):
        assert file.path == names[number]
        assert lease == CachedFile(f"/cache/{file.path}", file.size, hit=True)
        assert threading.active_count() == before
    assert source.started == []


def test_files_behind_those_that_are_here_are_fetched_meanwhile(source) -> None:
    names = [f"f{n}" for n in range(12)]
    items = iter(prefetcher(plan(*names), source, max_files=3, find=here(*names[:9])))
    assert next(items)[1].path == "f0"
    until(lambda: sorted(source.finished) == ["f10", "f11", "f9"])
    assert [file.path for _, file, _ in items] == names[1:]
    assert sorted(source.started) == ["f10", "f11", "f9"]


def test_a_late_file_does_not_stop_the_fetches_behind_it(source) -> None:
    names = [f"f{n}" for n in range(50)]
    source.hold("f0")
    items = iter(prefetcher(plan(*names), source, max_files=8))
    consumer = threading.Thread(target=lambda: [file.path for _, file, _ in items])
    consumer.start()
    # Eight at once, one of them held, and four times as many places in line.
    until(lambda: len(source.finished) == 31)
    assert settled(source) == 32
    source.gates["f0"].set()
    consumer.join(60)
    assert not consumer.is_alive()


def test_the_plan_is_read_no_further_than_needed(source) -> None:
    taken: list[int] = []

    def endless() -> Iterator[tuple[int, FileInfo]]:
        number = 0
        while True:
            taken.append(number)
            yield number, FileInfo(f"f{number}", 1)
            number += 1

    items = iter(prefetcher(endless(), source, max_files=4))
    assert [next(items)[0] for _ in range(10)] == list(range(10))
    settled(source)
    assert len(taken) <= 10 + 4 * 4 + 1
    items.close()


def test_an_error_travels_with_its_item(source) -> None:
    counters = Counters()
    out = list(prefetcher(plan("a", "bad", "c"), source, counters=counters))
    assert [file.path for _, file, _ in out] == ["a", "bad", "c"]
    assert isinstance(out[1][2], OSError)
    assert "cannot read bad" in str(out[1][2])
    assert (counters.files, counters.misses, counters.bad_files, counters.bytes_fetched) == (2, 2, 1, 20)


def test_an_error_of_the_plan_is_raised_at_its_place(source) -> None:
    def broken() -> Iterator[tuple[int, FileInfo]]:
        yield from plan("a", "b")
        raise LookupError("no such sample")

    items = iter(prefetcher(broken(), source))
    assert next(items)[1].path == "a"
    assert next(items)[1].path == "b"
    with pytest.raises(LookupError, match="no such sample"):
        next(items)


def test_a_file_on_which_nothing_moves_is_named_and_the_rest_goes_on(source) -> None:
    source.hold("stuck")
    out = list(prefetcher(plan("a", "stuck", "c", "d"), source, max_files=1, timeout=0.5))
    assert [file.path for _, file, _ in out] == ["a", "stuck", "c", "d"]
    assert isinstance(out[1][2], StalledError)
    assert "stuck: no byte moved for 0.5 s" in str(out[1][2])
    # When it arrives after all, nobody wants it: it is given back.
    source.gates["stuck"].set()
    until(lambda: "stuck" in source.released)


def test_a_slow_file_that_grows_is_not_stalled(source, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.touch()

    def grow(file: FileInfo) -> CachedFile:
        with in_transit(file, str(part)), part.open("ab", buffering=0) as out:
            end = time.monotonic() + 4
            while time.monotonic() < end:
                out.write(b"x")
                time.sleep(0.02)
        return CachedFile(str(part), file.size, hit=False)

    [(_, _, result)] = Prefetcher(plan("slow"), grow, max_files=2, max_bytes=100, timeout=2.5)
    assert isinstance(result, CachedFile)


class Disk:
    """A disk for so many files; a lease holds its place until it is released."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.used = 0
        self.fulls = 0
        self.lock = threading.Lock()

    def fetch(self, file: FileInfo) -> CachedFile:
        with self.lock:
            if self.used >= self.room:
                self.fulls += 1
                raise OSError(errno.ENOSPC, "No space left on device", file.path)
            self.used += 1
        time.sleep(0.01)
        return CachedFile(file.path, file.size, hit=False, on_release=self.give_back)

    def give_back(self) -> None:
        with self.lock:
            self.used -= 1


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_disk_too_small_for_the_line_slows_it(room) -> None:
    disk = Disk(room)
    names = [f"f{n}" for n in range(100)]
    fetcher = Prefetcher(plan(*names), disk.fetch, max_files=16, max_bytes=1 << 20, timeout=60)
    out = []
    for _, file, lease in fetcher:
        assert isinstance(lease, CachedFile), repr(lease)
        out.append(file.path)
        lease.release()
    assert out == names
    assert disk.fulls > 0
    until(lambda: disk.used == 0)


def test_a_disk_without_room_for_one_file_is_an_error_with_each_item() -> None:
    disk = Disk(0)
    results = [
        result for _, _, result in Prefetcher(plan(*"abcdef"), disk.fetch, max_files=4, max_bytes=100, timeout=60)
    ]
    assert len(results) == 6
    assert all(isinstance(result, OSError) and result.errno == errno.ENOSPC for result in results)


def test_closing_the_iterator_stops_at_once_and_releases_what_was_not_delivered(source) -> None:
    source.hold("late")
    items = iter(prefetcher(plan("a", "b", "c", "late", "never"), source, max_files=1))
    lease = next(items)[2]
    until(lambda: {"b", "c"} <= set(source.finished) and "late" in source.started)
    start = time.monotonic()
    items.close()
    assert time.monotonic() - start < 5
    assert sorted(source.released) == ["b", "c"]
    source.gates["late"].set()
    until(lambda: sorted(source.released) == ["b", "c", "late"])
    assert "never" not in source.started
    assert isinstance(lease, CachedFile)
    assert "a" not in source.released, "what was delivered is the consumer's"


def test_a_forgotten_iterator_stops_too(source) -> None:
    items = iter(prefetcher(plan(*[f"f{n}" for n in range(50)]), source, max_files=4))
    next(items)
    settled(source)
    del items
    gc.collect()
    started = len(source.started)
    until(lambda: len(source.released) == started - 1)
    assert settled(source) == started


def test_close_ends_an_iteration_that_waits(source) -> None:
    source.hold("a")
    fetcher = prefetcher(plan("a", "b"), source)
    out: list[object] = []
    consumer = threading.Thread(target=lambda: out.extend(fetcher))
    consumer.start()
    until(lambda: "a" in source.started)
    fetcher.close()
    consumer.join(30)
    assert not consumer.is_alive()
    assert out == []


def test_a_prefetcher_made_before_a_fork_works_in_the_child(source) -> None:
    fetcher = prefetcher(plan("a", "b", "c"), source)
    assert len(list(fetcher)) == 3
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if [file.path for _, file, _ in fetcher] == ["a", "b", "c"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_iterator_that_was_started_before_a_fork_says_so_in_the_child(source) -> None:
    items = iter(prefetcher(plan("a", "b", "c"), source))
    next(items)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            next(items)
        except RuntimeError as error:
            code = 0 if "after the fork" in str(error) and source.released == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [file.path for _, file, _ in items] == ["b", "c"]


@pytest.mark.parametrize("limits", [{"max_files": 0}, {"max_bytes": 0}, {"timeout": 0}])
def test_limits_must_be_positive(source, limits) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        prefetcher([], source, **limits)


def test_counters_tell_hits_from_misses() -> None:
    fetcher = Prefetcher(
        plan("hit", "miss"),
        lambda file: CachedFile(file.path, file.size, hit=file.path == "hit"),
        max_files=2,
        max_bytes=100,
        timeout=60,
    )
    list(fetcher)
    counters = fetcher.counters
    assert (counters.files, counters.hits, counters.misses, counters.bytes_fetched) == (2, 1, 1, 10)
    assert counters.wait_seconds > 0


@pytest.mark.parametrize(
    ("prefetch", "sharers", "files"),
    [(None, 1, 64), (None, 4, 32), (None, 48, 32), (16, 4, 4), (1, 8, 1), (256, 2, 128)],
)
def test_a_process_may_fetch_its_share_of_the_node_s_limit_and_by_default_enough(prefetch, sharers, files) -> None:
    assert fetches_at_once(prefetch, sharers) == files
