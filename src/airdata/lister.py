"""Listing a bucket with obstore, in a process that lives no longer than the listing.

    listing process                                child: a fresh interpreter
      {url, options, folders} ──► its stdin ──►      obstore, one page of 1,000 keys after the other
      FileInfo, FileInfo, …   ◄── its stdout ◄──     one line of JSON per page, and one that says that it was all

obstore lists a key in a twentieth of the time s3fs takes (78 µs, which is 78 s for a million), but its runtime must
never have run in a process that forks loader workers: they would wait for ever. So the training process, where a
volume is listed, lets a child do it. Credentials go through the pipe, and so reach no command line, file or pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from airdata.transport import FileInfo, Transport
from airdata.transport.object_store import ObjectTransport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["ListerError", "list_apart", "order_for"]

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The package's directory stands last on the path, so that nothing beside it takes the place of the standard library's.
_PROGRAM = "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; from airdata.lister import main; main()"
# obstore itself gives up on a request after some 20 s of retries.
_STALL_SECONDS = 90.0
_READ_BYTES = 1 << 20


class ListerError(Exception):
    """The child could not list; whoever asked lists in another way, and hears from that what the matter is."""


def order_for(transport: Transport, folders: Sequence[str]) -> str | None:
    """What to send a child that shall list these folders of a volume; None when it should not be asked."""
    if not isinstance(transport, ObjectTransport) or not transport.lists or not sys.executable:
        return None
    volume = transport.volume
    with contextlib.suppress(TypeError, ValueError):  # options that are objects: a session, a callback
        order = {"url": volume.url, "name": volume.name, "options": dict(volume.storage_options), "folders": folders}
        return json.dumps(order)
    return None


def list_apart(order: str, stall: float = _STALL_SECONDS) -> Generator[FileInfo, None, None]:
    """Every file below some folders, as a child finds them.

    Args:
        order: of :func:`order_for`.
        stall: seconds without a page after which the child is given up.

    Raises:
        ListerError: the child failed, stalled or ended early. What it has listed until then counts for nothing.
    """
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise ListerError(describe(error)) from error
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as request:
            request.write(order.encode())
        for line in _lines(child, stall):
            page = _parse(line)
            if "error" in page:
                raise ListerError(page["error"])
            if "files" not in page:
                return
            yield from map(FileInfo, *page["files"])
        raise ListerError(f"the child that lists ended with exit status {child.wait()}")
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _lines(child: subprocess.Popen[bytes], stall: float) -> Iterator[bytes]:
    """The lines that a child writes, until it closes its output."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        deadline = time.monotonic() + stall
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise ListerError(f"the child that lists has said nothing for {stall:g} s")
            data = os.read(child.stdout.fileno(), _READ_BYTES)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            if lines:
                deadline = time.monotonic() + stall
            yield from lines


def _parse(line: bytes) -> dict[str, Any]:
    try:
        page: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ListerError(f"the child that lists has said {line[:100]!r}") from None
    return page


def main() -> None:
    """The child's program."""
    order = json.load(sys.stdin.buffer)
    output = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # nothing that a library prints may get between the pages

    def say(**page: Any) -> None:
        output.write(json.dumps(page) + "\n")
        output.flush()

    try:
        volume = Volume(order["url"], order["name"], order["options"])
        for folder in order["folders"]:
            for files in ObjectTransport(volume, everywhere=True).pages(folder):
                say(files=[[f.path for f in files], [f.size for f in files], [f.version for f in files]])
        say(end=True)
    except BrokenPipeError:
        os._exit(1)  # the listing process is gone
    except Exception as error:  # noqa: BLE001 - the listing process does it in another way
        say(error=describe(error))
    os._exit(0)  # without waiting for obstore's threads
