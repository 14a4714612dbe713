import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from airdata.checkpoint import node
from airdata.checkpoint.node import NodeFolder, node_identity
from airdata.checkpoint.sharing import Share, SharedSource


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(node, "_FREE_BYTES", 0)
    monkeypatch.setattr(node, "_FREE_SHARE", 0.0)
    return tmp_path / f"airdata-loads-{os.geteuid()}"


def loads(base):
    return sorted(base.iterdir())


def process(base, program):
    """A process that has joined the folder "key" as ``folder`` and says so, and then runs the program."""
    source = f"""
import sys, tempfile
tempfile.tempdir = {str(base.parent)!r}
from airdata.checkpoint.node import NodeFolder
folder = NodeFolder.join("key")
print("joined", flush=True)
{program}
"""
    started = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "joined\n"
    return started


def test_one_of_many_fetches(base):
    fetched = []
    folders = [NodeFolder.join("key") for _ in range(6)]
    begin = threading.Barrier(6)

    def fetch():
        fetched.append(threading.get_ident())
        return b"content"

    def ask(folder):
        begin.wait(timeout=60)
        for name in ("a", "b"):
            assert folder.once(name, fetch) == b"content"

    threads = [threading.Thread(target=ask, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(fetched) == 2
    for folder in folders[1:]:
        folder.leave()
    assert len(loads(base)) == 1
    folders[0].leave()
    assert loads(base) == []


def test_what_is_done_by_all_its_users_goes(base):
    folders = [NodeFolder.join("key") for _ in range(2)]
    for folder in folders:
        folder.once("a", lambda: b"content")
    folders[0].done("a", 2)
    assert folders[0].once("a", lambda: b"other") == b"content"
    folders[1].done("a", 2)
    assert sorted(os.listdir(loads(base)[0])) == ["locks"]


def test_when_the_fetching_process_is_killed_the_next_one_fetches(base):
    fetching = process(base, 'folder.once("a", lambda: (print("fetching", flush=True), sys.stdin.read())[1].encode())')
    try:
        assert fetching.stdout.readline() == "fetching\n"
        folder = NodeFolder.join("key")
        answer = []
        waiting = threading.Thread(target=lambda: answer.append(folder.once("a", lambda: b"mine")))
        waiting.start()
        fetching.send_signal(signal.SIGKILL)
        waiting.join(timeout=60)
        assert answer == [b"mine"]
        folder.leave()
    finally:
        fetching.kill()
        fetching.communicate()
    assert loads(base) == []


def test_a_process_that_fetches_for_ever_is_not_waited_for(base, monkeypatch):
    monkeypatch.setattr("airdata.checkpoint.node._PATIENCE", 0.2)
    fetching = process(base, 'folder.once("a", lambda: (print("fetching", flush=True), sys.stdin.read())[1].encode())')
    try:
        assert fetching.stdout.readline() == "fetching\n"
        assert NodeFolder.join("key").once("a", lambda: b"mine") == b"mine"
    finally:
        fetching.kill()
        fetching.communicate()


def test_what_killed_loads_left_goes_with_the_next_load_and_what_running_ones_use_stays(base):
    killed = process(base, 'folder.once("a", lambda: b"content"); print("stored", flush=True); sys.stdin.read()')
    assert killed.stdout.readline() == "stored\n"
    running = NodeFolder.join("running")
    assert len(loads(base)) == 2
    killed.kill()
    killed.communicate()
    other = NodeFolder.join("other")
    assert not list(base.rglob("a"))
    assert len(loads(base)) == 2
    running.leave()
    other.leave()


def test_a_full_disk_costs_the_others_a_fetch_and_nothing_else(base, monkeypatch):
    folders = [NodeFolder.join("key") for _ in range(2)]

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert [folder.once("a", lambda: b"content") for folder in folders] == [b"content"] * 2
    assert not list(base.rglob("a*"))


def kept(base):
    """The bytes that the only load of the machine keeps."""
    return sum(path.stat().st_size for path in loads(base)[0].iterdir() if path.suffix != ".done")


@pytest.mark.parametrize(("limit", "value"), [("_FREE_BYTES", 1 << 62), ("_FREE_SHARE", 1.0)])
def test_what_is_to_stay_free_on_the_disk_stays_free_and_each_fetches_for_itself(limit, value, base, monkeypatch):
    monkeypatch.setattr(node, limit, value)
    folders = [NodeFolder.join("key") for _ in range(2)]
    assert [folders[rank].once("a", lambda rank=rank: b"%d" % rank) for rank in range(2)] == [b"0", b"1"]
    assert kept(base) == 0


def test_what_alone_would_take_the_last_of_the_disk_is_not_kept(base, monkeypatch):
    folder = NodeFolder.join("key")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 900, 100))
    monkeypatch.setattr(node, "_FREE_BYTES", 95)
    assert folder.once("a", lambda: b"123456") == b"123456"
    assert kept(base) == 0
    assert folder.once("b", lambda: b"12345") == b"12345"
    assert kept(base) == 5


def test_where_nothing_can_be_kept_no_process_waits_for_another(base, monkeypatch):
    fetching = process(base, 'folder.once("a", lambda: (print("fetching", flush=True), sys.stdin.read())[1].encode())')
    try:
        assert fetching.stdout.readline() == "fetching\n"
        monkeypatch.setattr(node, "_FREE_SHARE", 1.0)
        answer = []
        asking = threading.Thread(target=lambda: answer.append(NodeFolder.join("key").once("a", lambda: b"mine")))
        asking.start()
        asking.join(timeout=60)
        assert answer == [b"mine"]
    finally:
        fetching.kill()
        fetching.communicate()


class Numbered:
    """A source whose bytes say where they lie."""

    def __init__(self):
        self.content = np.arange(1 << 12, dtype=np.uint8)
        self.bytes = 0

    def read_into(self, name, start, views):
        for view in views:
            view[:] = self.content[start : start + len(view)]
            start += len(view)
            self.bytes += len(view)


def test_a_rank_far_ahead_keeps_a_bounded_part_for_the_others_and_all_read_the_same(base, monkeypatch):
    monkeypatch.setattr(node, "_OWN_BYTES", 512)
    size, piece = 1 << 12, 128
    pieces = np.array([(start, start + piece, 2) for start in range(0, size, piece)])
    sources = [Numbered(), Numbered()]
    ranks = [SharedSource(source, Share("key", 0, 2, {"f": pieces}), [("f", 0, size)]) for source in sources]
    results = [np.zeros(size, np.uint8) for _ in ranks]
    ranks[0].read_into("f", 0, [results[0]])
    assert kept(base) == 512
    ranks[1].read_into("f", 0, [results[1]])
    for result in results:
        assert np.array_equal(result, sources[0].content)
    assert [source.bytes for source in sources] == [size, size - 512]
    assert kept(base) == 0
    for rank in ranks:
        rank.close()
    assert loads(base) == []


def test_what_the_others_have_read_makes_room(base, monkeypatch):
    monkeypatch.setattr(node, "_OWN_BYTES", 4)
    folders = [NodeFolder.join("key") for _ in range(2)]
    for name in ("a", "b", "c"):
        assert folders[0].once(name, lambda: b"mine") == b"mine"
        assert folders[1].once(name, lambda: b"other") == b"mine"
        assert kept(base) == 4
        for folder in folders:
            folder.done(name, 2)


def test_an_error_is_raised_and_the_name_is_free_again(base):
    folder = NodeFolder.join("key")

    def broken():
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        folder.once("a", broken)
    assert folder.once("a", lambda: b"content") == b"content"


@pytest.mark.parametrize("obstacle", ["a link", "a file", "writable by all"])
def test_what_others_may_have_put_in_its_place_is_not_used(obstacle, base, tmp_path):
    if obstacle == "a link":
        (tmp_path / "elsewhere").mkdir()
        base.symlink_to(tmp_path / "elsewhere")
    elif obstacle == "a file":
        base.write_text("")
    else:
        base.mkdir()
        base.chmod(0o777)
    assert NodeFolder.join("key") is None


def test_the_identity_of_a_node_is_that_of_its_temporary_directory(tmp_path, monkeypatch):
    first = node_identity()
    assert node_identity() == first
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path.parent))
    assert node_identity() != first
