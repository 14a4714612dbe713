"""The threads of a process take turns at the cache: whatever becomes of one of them, the others go on."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from airdata.cache import VolumeCache
from airdata.errors import SourceChangedError
from airdata.transport import FileInfo
from airdata.transport.local import LocalTransport
from airdata.volume import Volume

# Any file is ten times x. Opens files in the main thread, which is interrupted at random moments, then in another one.
INTERRUPTED = """
import random, signal, sys, threading, time
from pathlib import Path
from airdata.cache import VolumeCache
from airdata.transport import FileInfo
from airdata.transport.local import LocalTransport
from airdata.volume import Volume

class Quick(LocalTransport):
    def get(self, path, destination, version="", size=-1):
        return Path(destination).write_bytes(b"x" * 10)

class Interrupt(BaseException):
    pass

def interrupt(*_):
    raise Interrupt

transport = Quick(Volume.of(sys.argv[1]))
cache = VolumeCache(sys.argv[2], min_free_bytes=0)
cache.open(transport, FileInfo("first", 10, "1")).release()
signal.signal(signal.SIGALRM, interrupt)
interrupts, until = 0, time.monotonic() + 3
while time.monotonic() < until:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 4e-4))
        cache.open(transport, FileInfo(str(time.monotonic_ns()), 10, "1")).release()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        interrupts += 1
assert interrupts > 100, interrupts
other = threading.Thread(target=lambda: print(cache.open(transport, FileInfo("last", 10, "1")).size), daemon=True)
other.start()
other.join(30)
"""


class Directory(LocalTransport):
    """A source whose listing says ten bytes of every file."""

    def __init__(self, directory: Path, sent: int = 10) -> None:
        directory.mkdir()
        super().__init__(Volume.of(str(directory)))
        self.sent = sent

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        Path(destination).write_bytes(b"x" * self.sent)
        return 10


def test_interrupts_at_any_moment_leave_the_turn_to_others(tmp_path) -> None:
    (tmp_path / "volume").mkdir()
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "volume"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "10"


def test_an_interrupted_download_leaves_nothing_and_the_next_one_lands(tmp_path) -> None:
    class Interrupted(Directory):
        interrupted = False

        def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
            if path == "mine" and not self.interrupted:
                self.interrupted = True
                with ThreadPoolExecutor(4) as threads:  # others are at it when this one is interrupted
                    list(
                        threads.map(lambda number: cache.open(self, FileInfo(number, 10, "1")).release(), "0123456789")
                    )
                signal.raise_signal(signal.SIGINT)
            return super().get(path, destination, version, size)

    transport = Interrupted(tmp_path / "volume")
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0)
    with pytest.raises(KeyboardInterrupt):
        cache.open(transport, FileInfo("mine", 10, "1"))
    with cache.open(transport, FileInfo("mine", 10, "1")) as lease:
        assert lease.local_path.startswith(str(tmp_path / "cache" / "files"))
    assert os.listdir(tmp_path / "cache" / "parts") == []
    assert cache.info().files == 11


def test_a_new_source_that_waits_for_the_catalogue_holds_up_no_other(tmp_path) -> None:
    known, new = Directory(tmp_path / "known"), Directory(tmp_path / "new")
    cache = VolumeCache(tmp_path / "cache", min_free_bytes=0)
    cache.open(known, FileInfo("a", 10, "1")).release()
    another_process = sqlite3.connect(tmp_path / "cache" / "catalogue" / "cache.db", isolation_level=None)
    another_process.execute("BEGIN EXCLUSIVE")
    begun = threading.Event()

    def open_new() -> None:
        begun.set()
        cache.open(new, FileInfo("a", 10, "1")).release()

    waits = threading.Thread(target=open_new)
    waits.start()
    begun.wait(10)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: cache.open(known, FileInfo("b", 10, "1")).release()).result(timeout=3)
    assert waits.is_alive()
    another_process.execute("COMMIT")
    waits.join(60)
    assert not waits.is_alive()


@pytest.mark.parametrize("max_bytes", [None, 0])
def test_what_a_transport_counts_is_not_taken_for_what_is_on_disk(tmp_path, max_bytes) -> None:
    short = Directory(tmp_path / "volume", sent=4)
    cache = VolumeCache(tmp_path / "cache", max_bytes=max_bytes, min_free_bytes=0)
    with pytest.raises(SourceChangedError, match="listed with 10 bytes and 4 came"):
        cache.open(short, FileInfo("a", 10, "1"))
