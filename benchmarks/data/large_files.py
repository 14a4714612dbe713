"""What parallel ranges give for one large file, by size of the parts and number of threads.

Each connection carries 40 MB/s and the first byte takes 20 ms: an object store as one client sees it, while the network
could do far more. In the way of a single stream stands the connection, in the way of small parts the first byte.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from object_server import BUCKET, CREDENTIALS, ObjectServer, key
from report import Table, in_turns

from airdata.transport import parts
from airdata.transport.object_store import ObjectTransport
from airdata.transport.remote import FsspecTransport
from airdata.volume import Volume

LATENCY = 0.02
BYTES_PER_SECOND = 40e6
_PIECE = 1 << 17


async def _relay(upstream: tuple[str, int]) -> None:
    """Pass connections on, with answers no faster than a connection to a store is."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: float) -> None:
        due = 0.0
        while data := await reader.read(_PIECE):
            now = time.monotonic()
            due = max(due, now) + len(data) / rate
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(due - now)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*upstream)
        ways = (pump(reader, far_writer, 1e12), pump(far_reader, writer, BYTES_PER_SECOND))
        await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def measure(rounds: int, *, quick: bool = False) -> Table:
    """One file of 64 MiB (8 MiB when quick), in each way."""
    size = (8 if quick else 64) << 20
    with ObjectServer.start({"large": (1, size)}, latencies=(LATENCY,)) as server:
        address = urlsplit(server.url(LATENCY))
        relay = subprocess.Popen(
            [sys.executable, __file__, str(address.hostname), str(address.port)], stdout=subprocess.PIPE, text=True
        )
        try:
            endpoint = f"http://127.0.0.1:{int(relay.stdout.readline())}"
            volume = Volume.of(f"s3://{BUCKET}", {**CREDENTIALS, "endpoint_url": endpoint})
            with tempfile.TemporaryDirectory() as directory:
                return _table(volume, size, Path(directory) / "copy", rounds, quick=quick)
        finally:
            relay.kill()
            relay.communicate()


def _table(volume: Volume, size: int, copy: Path, rounds: int, *, quick: bool) -> Table:
    obstore, s3fs = ObjectTransport(volume, everywhere=True), FsspecTransport(volume)
    name = key("large", 0)

    def side(transport: FsspecTransport, part: int, threads: int) -> Callable[[], float]:
        def run() -> float:
            with mock.patch.multiple(parts, PART_BYTES=part, _THREADS_PER_FILE=threads):
                start = time.perf_counter()
                parts.fetch_parts(copy, size, lambda piece, moved: transport._part(name, piece, "", moved))
                return time.perf_counter() - start

        return run

    def stream() -> float:
        start = time.perf_counter()
        obstore._fast("reading", name, lambda store: _stream(store, name, copy), lambda: 0)
        return time.perf_counter() - start

    sides = {"obstore, one stream": stream}
    megabytes, threads = ((1, 4), (2, 4)) if quick else ((4, 8, 16), (4, 8, 12))
    for part, number in itertools.product(megabytes, threads):
        sides[f"obstore, {number} threads, parts of {part} MiB"] = side(obstore, part << 20, number)
    ours = f"obstore, {threads[1]} threads, parts of {megabytes[1]} MiB"
    sides[f"s3fs, {threads[1]} threads, parts of {megabytes[1]} MiB"] = side(s3fs, megabytes[1] << 20, threads[1])
    found = in_turns(rounds, sides)
    return Table(
        f"One file of {size >> 20} MiB, {BYTES_PER_SECOND / 1e6:.0f} MB/s a connection, {LATENCY * 1000:.0f} ms",
        found,
        [("obstore, one stream", ours, 3.0)],
    )


def _stream(store: object, name: str, copy: Path) -> int:
    import obstore

    with copy.open("wb") as target:
        target.writelines(obstore.get(store, name).stream(min_chunk_size=_PIECE))
        return target.tell()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_relay((sys.argv[1], int(sys.argv[2]))))
    else:
        print(measure(5))
