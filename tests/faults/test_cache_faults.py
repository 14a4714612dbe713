"""Many processes at one cache, killed, stopped, and short of disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import airdata.cache
from airdata.cache import VolumeCache, cache_info, open_file
from airdata.cache.names import entry_name, generation_name
from airdata.cache.root import Layout
from airdata.prefetch import Prefetcher
from airdata.transport import FileInfo, open_transport
from airdata.transport.local import LocalTransport
from airdata.volume import Volume

# Forked, so that 64 of them start in a moment; the transports here use no threads before the fork.
processes = multiprocessing.get_context("fork")


class SlowTransport(LocalTransport):
    """A directory read as if it were remote: slowly, in pieces, and with a note of every fetch in a file."""

    def __init__(self, directory: Path, log: Path, *, delay: float = 0.0, pieces: int = 1) -> None:
        super().__init__(Volume.of(str(directory)))
        self.log = log
        self.delay = delay
        self.pieces = pieces

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        with self.log.open("ab", buffering=0) as log:
            log.write(f"{path}\n".encode())
        content = (Path(self._root) / path).read_bytes()
        step = max(1, len(content) // self.pieces)
        with open(destination, "wb") as out:
            for start in range(0, len(content), step):
                time.sleep(random.uniform(0, self.delay))
                out.write(content[start : start + step])
                out.flush()
        return len(content)

    def fetches(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def contents(tmp_path: Path, make_files: Callable[..., dict[str, bytes]]) -> dict[str, bytes]:
    return make_files(tmp_path / "volume", 24, size=20_000)


@pytest.fixture
def transport(tmp_path: Path, contents: dict[str, bytes]) -> SlowTransport:
    return SlowTransport(tmp_path / "volume", tmp_path / "fetches")


@pytest.fixture
def files(transport: SlowTransport) -> list[FileInfo]:
    return sorted(transport.list(), key=lambda file: file.path)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts memory-backed disks of a given size."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        directory = tmp_path / f"disk{len(mounted)}"
        directory.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def in_processes(count: int, body: Callable[[int], Any], *, timeout: float = 120) -> list[Any]:
    """Run ``body(number)`` in processes that start together; their answers, by number."""
    gate = processes.Barrier(count)
    pipes, members = [], []

    def run(number: int, pipe: Connection) -> None:
        gate.wait(timeout)
        try:
            pipe.send((True, body(number)))
        except BaseException as error:  # noqa: BLE001 - shown by the parent
            pipe.send((False, repr(error)))

    for number in range(count):
        ours, theirs = processes.Pipe(duplex=False)
        member = processes.Process(target=run, args=(number, theirs), daemon=True)
        member.start()
        theirs.close()
        pipes.append(ours)
        members.append(member)
    answers = []
    try:
        for pipe in pipes:
            assert pipe.poll(timeout), "a process does not answer"
            fine, answer = pipe.recv()
            assert fine, answer
            answers.append(answer)
        for member in members:
            member.join(timeout)
            assert member.exitcode == 0
    finally:
        for member in members:
            member.kill()
    return answers


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


# --- one fetch per node ---


def test_one_object_asked_for_by_eight_processes_costs_one_get(s3_volume, s3_proxy, tmp_path) -> None:
    content = random.Random(0).randbytes(4 << 20)
    direct = open_transport(s3_volume)
    direct.put("cats/large.bin", content)
    options = {**s3_volume.storage_options, "endpoint_url": s3_proxy.url}
    transport = open_transport(Volume.of(s3_volume.url, options))
    file = direct.stat("cats/large.bin")
    s3_proxy.set_faults({"method": "GET", "match": "large.bin", "latency": 0.5})
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0)

    def ask(number: int) -> tuple[str, bool]:
        with open_file(cache, transport, file) as lease:
            return hashlib.sha256(read(lease.local_path)).hexdigest(), lease.hit

    answers = in_processes(8, ask)
    assert {digest for digest, _ in answers} == {hashlib.sha256(content).hexdigest()}
    assert sorted(hit for _, hit in answers) == [False] + [True] * 7
    assert len(s3_proxy.requests("GET", "large.bin")) == 1


def test_an_object_that_may_not_stay_costs_one_get_too(transport, files, contents, tmp_path) -> None:
    transport.delay, transport.pieces = 0.2, 5
    cache = VolumeCache(tmp_path / "cache", max_bytes=0)
    gate = processes.Barrier(8)

    def ask(number: int) -> bool:
        with cache.open(transport, files[0]) as lease:
            same = read(lease.local_path) == contents[files[0].path]
            gate.wait(60)
            return same

    assert in_processes(8, ask) == [True] * 8
    assert len(transport.fetches()) == 1
    assert os.listdir(tmp_path / "cache" / "transient") == []


def test_the_second_epoch_of_a_node_reads_nothing(transport, files, tmp_path) -> None:
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0)

    def epochs(number: int) -> None:
        for epoch in range(2):
            order = files[:]
            random.Random(epoch * 10 + number).shuffle(order)
            for file in order:
                cache.open(transport, file).release()

    in_processes(4, epochs)
    assert sorted(transport.fetches()) == sorted(file.path for file in files)


def test_sixty_four_processes_open_a_cache_at_once(transport, files, contents, tmp_path) -> None:
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0)

    def ask(number: int) -> float:
        file = files[number % 8]
        start = time.monotonic()
        with cache.open(transport, file) as lease:
            assert read(lease.local_path) == contents[file.path]
        return time.monotonic() - start

    assert max(in_processes(64, ask)) < 60
    assert sorted(transport.fetches()) == sorted(file.path for file in files[:8])


@pytest.mark.parametrize("accesses", [100, pytest.param(1250, marks=pytest.mark.slow)])
def test_a_cache_of_three_files_never_yields_a_path_that_does_not_open(
    transport, files, contents, tmp_path, accesses
) -> None:
    transport.delay = 0.002
    cache = VolumeCache(tmp_path / "cache", max_bytes=3 * files[0].size, min_free_bytes=0)

    def wander(number: int) -> int:
        chance = random.Random(number)
        held = []
        for _ in range(accesses):
            file = chance.choice(files[:8])
            held.append((cache.open(transport, file), file))
            time.sleep(chance.uniform(0, 0.002))
            while len(held) > chance.randrange(4):
                lease, file = held.pop(chance.randrange(len(held)))
                assert read(lease.local_path) == contents[file.path]
                lease.release()
        for lease, file in held:
            assert read(lease.local_path) == contents[file.path]
            lease.release()
        return accesses

    assert sum(in_processes(8, wander, timeout=170)) == 8 * accesses
    assert cache_info(tmp_path / "cache").bytes <= 3 * files[0].size
    assert os.listdir(tmp_path / "cache" / "transient") == []


# --- killed and stopped ---


@pytest.mark.parametrize("kills", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_killing_readers_at_random_moments_loses_and_corrupts_nothing(
    transport, files, contents, tmp_path, kills
) -> None:
    transport.delay, transport.pieces = 0.003, 4
    limit = sum(file.size for file in files[:12])
    directory = tmp_path / "cache"
    cache = VolumeCache(directory, max_bytes=limit, min_free_bytes=0)

    def wander(seed: int, faults: Connection) -> None:
        chance = random.Random(seed)
        try:
            while True:
                file = chance.choice(files)
                with cache.open(transport, file) as lease:
                    if read(lease.local_path) != contents[file.path]:
                        faults.send(f"wrong bytes of {file.path}")
        except BaseException as error:  # noqa: BLE001 - shown by the parent
            faults.send(repr(error))

    ours, theirs = processes.Pipe(duplex=False)

    def start(seed: int) -> Any:
        member = processes.Process(target=wander, args=(seed, theirs), daemon=True)
        member.start()
        return member

    chance = random.Random(7)
    members = [start(seed) for seed in range(4)]
    try:
        until(lambda: len(transport.fetches()) > 4)
        for kill in range(kills):
            victim = chance.randrange(len(members))
            fetched = len(transport.fetches())
            members[victim].kill()
            members[victim].join()
            members[victim] = start(100 + kill)
            # The others go on: half of the files always pass through, so fetches never end.
            until(lambda fetched=fetched: len(transport.fetches()) > fetched)
            time.sleep(chance.uniform(0, 0.02))
    finally:
        for member in members:
            member.kill()
            member.join()
    assert not ours.poll(), ours.recv()

    # The next start finds nothing but whole files, and sweeps the rest.
    for file in files:
        with VolumeCache(directory, max_bytes=limit, min_free_bytes=0).open(transport, file) as lease:
            assert read(lease.local_path) == contents[file.path]
    layout = Layout(str(directory))
    assert os.listdir(layout.parts) == []
    assert os.listdir(layout.transient) == []
    by_name = {os.path.basename(path): content for path, content in contents.items()}
    kept = [os.path.join(folder, name) for folder, _, names in os.walk(layout.files) for name in names]
    assert kept
    for path in kept:
        assert read(path) == by_name[os.path.basename(path)]


def fetcher_in_the_middle(transport: SlowTransport, cache: VolumeCache, file: FileInfo) -> Any:
    """A process that has fetched a part of ``file`` and will take minutes for the rest."""
    slow = SlowTransport(Path(transport._root), transport.log, delay=60.0, pieces=1000)
    member = processes.Process(target=lambda: cache.open(slow, file), daemon=True)
    member.start()
    until(lambda: transport.fetches() == [file.path])
    return member


def test_a_waiter_takes_over_when_the_fetcher_is_killed(transport, files, contents, tmp_path) -> None:
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0)
    member = fetcher_in_the_middle(transport, cache, files[0])
    pipe, theirs = processes.Pipe(duplex=False)

    def wait() -> None:
        with cache.open(transport, files[0]) as lease:
            theirs.send(read(lease.local_path) == contents[files[0].path])

    waiter = processes.Process(target=wait, daemon=True)
    waiter.start()
    assert not pipe.poll(0.3), "it should wait for the one who fetches"
    member.kill()
    assert pipe.poll(60)
    assert pipe.recv() is True
    assert len(transport.fetches()) == 2
    waiter.join()


def test_a_stopped_fetcher_is_not_waited_for_for_ever(transport, files, contents, tmp_path, caplog) -> None:
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0, patience=0.5)
    member = fetcher_in_the_middle(transport, cache, files[0])
    os.kill(member.pid, signal.SIGSTOP)
    try:
        with cache.open(transport, files[0]) as lease:
            assert read(lease.local_path) == contents[files[0].path]
        assert "another process fetches" in caplog.text
        with cache.open(transport, files[1]) as lease:
            assert read(lease.local_path) == contents[files[1].path]
    finally:
        member.kill()
        member.join()


def test_what_dead_processes_and_broken_disks_leave_is_swept_or_replaced(transport, files, contents, tmp_path) -> None:
    directory = tmp_path / "cache"
    with VolumeCache(directory, min_free_bytes=0).open(transport, files[4]):
        pass
    layout, generation = Layout(str(directory)), generation_name(transport.volume.url)
    names = [entry_name(generation, file) for file in files]
    Path(layout.locks).write_bytes(b"garbage" * 1000)
    Path(layout.usage).write_bytes(b"short")
    Path(layout.part(names[0])).write_bytes(b"x" * 5_000_000)
    Path(layout.parts, "not-ours.part").write_bytes(b"x")
    for name, leftover in ((names[1], b""), (names[2], b"truncated"), (names[3], b"x" * files[3].size * 2)):
        entry = Path(layout.first(name))
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(leftover)
        os.utime(entry, ns=(0, name.stamp(time.time_ns())))  # as a power cut leaves it
    passing = Path(layout.passing(names[5]))
    passing.parent.mkdir(parents=True)
    passing.write_bytes(b"left by a dead reader")
    for trash in (Path(layout.trash, generation + ".0011"), Path(layout.trash, "mine")):
        trash.mkdir()
        (trash / "file").write_bytes(b"x")
    with contextlib.suppress(FileNotFoundError):
        (Path(layout.catalogue) / "cache.db").write_bytes(b"this is no database")

    cache = VolumeCache(directory, min_free_bytes=0)
    for file in files:
        with cache.open(transport, file) as lease:
            assert read(lease.local_path) == contents[file.path]
    assert os.listdir(layout.parts) == ["not-ours.part"]
    assert os.listdir(layout.trash) == ["mine"]
    assert not passing.exists()
    assert cache.info().bytes == sum(file.size for file in files)


# --- several users ---


def test_users_of_one_machine_do_not_meet(contents, monkeypatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two other users")
    # Imported now, since the other users may not be allowed to read where packages lie.
    import encodings.ascii  # noqa: F401

    import diskcache  # noqa: F401

    shared = Path(tempfile.mkdtemp(prefix="airdata-users-", dir="/tmp"))
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    for name in ("AIRDATA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    volume = shared / "volume"
    volume.mkdir()
    content = next(iter(contents.values()))
    (volume / "one.bin").write_bytes(content)
    (volume / "one.bin").chmod(0o644)
    transport = LocalTransport(Volume.of(str(volume)))
    file = transport.stat("one.bin")
    users = (54321, 54322)
    gate = processes.Barrier(len(users))

    def use(number: int) -> tuple[str, bool, int]:
        os.setgroups([])
        os.setresgid(users[number], users[number], users[number])
        os.setresuid(users[number], users[number], users[number])
        monkeypatch.setenv("HOME", "/proc/no-home")  # as for a service: none to write in
        cache = VolumeCache(airdata.cache.scratch_directory(), min_free_bytes=0)
        with cache.open(transport, file) as lease:
            same = read(lease.local_path) == content
            gate.wait(60)  # both are there now
            with pytest.raises(PermissionError):
                os.listdir(f"{shared}/airdata-{users[1 - number]}")
            gate.wait(60)
            return lease.local_path, same, os.stat(cache.directory).st_mode & 0o777

    try:
        for number, (local_path, same, mode) in enumerate(in_processes(2, use)):
            assert local_path.startswith(f"{shared}/airdata-{users[number]}/")
            assert same
            assert mode == 0o700
    finally:
        subprocess.run(["rm", "-r", str(shared)], check=True)


# --- short of disk ---


def test_a_tiny_disk_slows_the_run_and_does_not_stop_it(tmpfs, tmp_path, make_files, caplog) -> None:
    # 1 MiB for 24 files of 60 kB, and for the catalogue: about half fits.
    contents = make_files(tmp_path / "larger", 24, size=60_000)
    transport = SlowTransport(tmp_path / "larger", tmp_path / "fetches")
    files = sorted(transport.list(), key=lambda file: file.path)
    cache = VolumeCache(tmpfs("size=1m") / "cache", min_free_bytes=0)
    with caplog.at_level(logging.WARNING, logger="airdata"):
        for _epoch in range(2):
            plan = [(file.path, file) for file in files]
            fetch = Prefetcher(
                plan, lambda file: cache.open(transport, file), max_files=8, max_bytes=1 << 20, timeout=60
            )
            out = 0
            for path, _, lease in fetch:
                assert not isinstance(lease, Exception), repr(lease)
                assert read(lease.local_path) == contents[path]
                lease.release()
                out += 1
            assert out == len(files)
    assert fetch.counters.hits >= 3
    assert len(caplog.records) <= 1


def test_a_disk_without_a_free_byte(tmpfs, transport, files, contents, caplog) -> None:
    disk = tmpfs("size=64k")
    with contextlib.suppress(OSError), (disk / "film.mkv").open("wb", buffering=0) as film:
        while True:
            film.write(bytes(4096))
    cache = VolumeCache(disk, min_free_bytes=0)
    for file in files:
        with cache.open(transport, file) as lease:
            assert read(lease.local_path) == contents[file.path]
    assert len(caplog.records) == 1
    assert (disk / "film.mkv").exists()


def test_a_disk_without_inodes(tmpfs, transport, files, contents) -> None:
    cache = VolumeCache(tmpfs("size=10m,nr_inodes=32") / "cache", min_free_bytes=0)
    for _epoch in range(2):
        for file in files:
            with cache.open(transport, file) as lease:
                assert read(lease.local_path) == contents[file.path]
    assert 0 < cache.info().files < len(files)


def test_a_disk_that_is_full_like_the_temporary_directory(tmpfs, transport, files, contents, monkeypatch) -> None:
    disk = tmpfs("size=64k")
    with contextlib.suppress(OSError), (disk / "film.mkv").open("wb", buffering=0) as film:
        while True:
            film.write(bytes(4096))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    memory = tmpfs("size=10m")
    monkeypatch.setattr(airdata.cache, "_MEMORY", str(memory / "airdata"))
    with VolumeCache(disk / "cache", min_free_bytes=0).open(transport, files[0]) as lease:
        assert read(lease.local_path) == contents[files[0].path]
        assert lease.local_path.startswith(str(memory))
    assert not os.path.exists(lease.local_path)


def test_a_disk_too_small_for_what_is_in_flight(tmpfs, transport, files, contents, monkeypatch) -> None:
    # Room for the catalogue and some of 24 files of 20 kB, and nowhere else to go.
    disk = tmpfs("size=400k")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(airdata.cache, "_MEMORY", str(disk / "memory"))
    cache = VolumeCache(disk / "cache", max_bytes=0)
    transport.delay, transport.pieces = 0.01, 4
    plan = [(file.path, file) for file in files * 3]
    fetch = Prefetcher(plan, lambda file: cache.open(transport, file), max_files=24, max_bytes=1 << 20, timeout=60)
    out = []
    for path, _, lease in fetch:
        assert not isinstance(lease, Exception), repr(lease)
        assert read(lease.local_path) == contents[path]
        lease.release()
        out.append(path)
    assert out == [path for path, _ in plan]


def test_a_read_only_disk(tmpfs, transport, files, contents, caplog) -> None:
    disk = tmpfs("size=10m")

    def fill(number: int) -> None:
        for file in files[:5]:
            VolumeCache(disk, min_free_bytes=0).open(transport, file).release()

    in_processes(1, fill)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    cache = VolumeCache(disk, min_free_bytes=0)
    for file in files:
        with cache.open(transport, file) as lease:
            assert read(lease.local_path) == contents[file.path]
    assert len(caplog.records) == 1
    assert "Read-only" in caplog.text
