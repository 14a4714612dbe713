"""Processes started in every way, before and after their parent has read, on every client."""

from __future__ import annotations

import logging
import multiprocessing
import os

import pytest

from airdata.transport import open_transport
from airdata.transport.object_store import ObjectTransport

METHODS = ["fork", "spawn", "forkserver"]


def _read(transport, connection):
    """Read, and say by which client."""
    content = transport.read("a")
    by_obstore = transport._stores._slot().proven
    connection.send((content, by_obstore))


def _in_child(method, transport, *, daemon):
    """What a child reads, and whether by obstore."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_read, args=(transport, theirs), daemon=daemon)
    child.start()
    theirs.close()
    try:
        assert ours.poll(90), "the child hung"
        return ours.recv()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("method", METHODS)
def test_workers_read_through_obstore_and_the_process_that_starts_them_does_not(method, s3_volume, program, finish):
    # In a program of its own: the tests around this one have used obstore in this very process.
    code = """
        import multiprocessing, sys
        from airdata.transport import open_transport
        from airdata.volume import Volume

        def read(transport, connection):
            connection.send((transport.read("a"), transport._stores._slot().proven))

        if __name__ == "__main__":
            method, url, endpoint = sys.argv[1:]
            transport = open_transport(Volume.of(url, {"key": "test", "secret": "test", "endpoint_url": endpoint}))
            print(transport.read("a"), transport._stores._slot().proven)
            context = multiprocessing.get_context(method)
            for daemon in (True, False):
                ours, theirs = context.Pipe()
                worker = context.Process(target=read, args=(transport, theirs), daemon=daemon)
                worker.start()
                assert ours.poll(90), "the worker hung"
                print(*ours.recv())
                worker.join(30)
            print(transport.read("a"))
    """
    open_transport(s3_volume).put("a", b"bytes")
    output = finish(program(code, method, s3_volume.url, s3_volume.storage_options["endpoint_url"]))
    assert output.splitlines() == [
        "b'bytes' False",  # it may fork
        "b'bytes' True",
        "b'bytes' False",  # it too may fork
        "b'bytes'",
    ]


def test_a_child_forked_from_a_user_of_obstore_warns_once_and_reads_through_fsspec(s3_volume, capfd):
    transport = ObjectTransport(s3_volume, everywhere=True)
    transport.put("a", b"bytes")
    assert transport.read("a") == b"bytes"
    assert transport._stores._slot().proven
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            logging.basicConfig(level=logging.WARNING, force=True)
            content = b"".join(transport.read("a") for _ in range(3))
            os.write(write, content + (b" obstore" if transport._stores._slot().proven else b" fsspec"))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read() == b"bytesbytesbytes fsspec"
    os.waitpid(pid, 0)
    assert capfd.readouterr().err.count("was forked from one that had used obstore") == 1
    assert transport.read("a") == b"bytes", "the parent goes on as before"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_reads_after_its_parent_did(method, s3_volume):
    transport = ObjectTransport(s3_volume, everywhere=True)
    transport.put("a", b"bytes")
    assert transport.read("a") == b"bytes"
    content, by_obstore = _in_child(method, transport, daemon=True)
    assert (content, by_obstore) == (b"bytes", method != "fork")


def test_loader_workers_read_whatever_the_parent_has_read_before(s3_volume):
    import airdata

    transport = open_transport(s3_volume)
    for name in ("x/a", "x/b", "y/c"):
        transport.put(name, name.encode())
    dataset = airdata.UCVolumeDataset(s3_volume, yields="bytes")
    assert sorted(dataset) == [b"x/a", b"x/b", b"y/c"]
    loader = airdata.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == [b"x/a", b"x/b", b"y/c"]
