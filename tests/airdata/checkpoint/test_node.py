import os
import signal
import subprocess
import sys
import threading

import pytest

from airdata.checkpoint.node import NodeFolder, node_identity


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
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
