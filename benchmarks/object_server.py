"""An S3 server for benchmarks: so cheap that the clients are what is measured.

Serves made-up objects from memory, one process, one thread, asyncio, some 50 µs of processor time a request where moto
takes milliseconds. Understands what readers ask: ``GET`` with a range and conditions, ``HEAD`` and ``ListObjectsV2``;
everything else is refused. It listens on one port for each first-byte latency, so that one server stands for a near
store and a far one, and counts what it sends.

    server = ObjectServer.start({"small": (1000, 110_000)}, latencies=(0, 0.05))
    server.url(0.05)        # endpoint; bucket "bench", objects small/class0/000000.jpg and so on
    server.sent()           # requests for object bytes, and the bytes
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bench"
CREDENTIALS = {"key": "benchmark", "secret": "benchmark"}
_PAGE = 1000
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Sent(NamedTuple):
    """What a server has sent: GETs of objects, their bytes, and the processor seconds it took for everything."""

    gets: int
    bytes: int
    cpu_seconds: float


@dataclass
class ObjectServer:
    """A running server."""

    process: subprocess.Popen
    ports: Mapping[float, int]

    @staticmethod
    def start(folders: Mapping[str, tuple[int, int]], latencies: Sequence[float] = (0.0,)) -> ObjectServer:
        """Serve ``folders``: (number, bytes each) of the objects in each folder of the bucket."""
        command = [sys.executable, __file__, json.dumps([folders, list(latencies)])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ports = json.loads(process.stdout.readline())
        return ObjectServer(process, dict(zip(latencies, ports, strict=True)))

    def url(self, latency: float = 0.0) -> str:
        """The endpoint with so many seconds before each first byte."""
        return f"http://127.0.0.1:{self.ports[latency]}"

    def sent(self) -> Sent:
        """What was sent so far, over all ports."""
        with urllib.request.urlopen(f"{self.url(next(iter(self.ports)))}/__sent__") as answer:
            return Sent(*json.load(answer))

    def stop(self) -> None:
        """End the server."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def key(folder: str, number: int) -> str:
    """The key of an object."""
    return f"{folder}/class{number % 10}/{number:06d}.jpg"


class _Objects:
    """The content of the bucket. All objects of a folder share their bytes: what is measured does not look at them."""

    def __init__(self, folders: Mapping[str, tuple[int, int]]) -> None:
        self.bodies: dict[str, bytes] = {}
        self._etags: dict[str, str] = {}
        for folder, (count, size) in folders.items():
            body = random.Random(folder).randbytes(size)
            self.bodies.update({key(folder, number): body for number in range(count)})
            self._etags[folder] = f'"{hashlib.md5(body).hexdigest()}"'  # as S3's is, and rclone checks it
        self.keys = sorted(self.bodies)
        self.gets = self.sent = 0

    def etag(self, name: str) -> str:
        return self._etags[name.partition("/")[0]]

    def page(self, query: Mapping[str, str]) -> bytes:
        """An answer to ListObjectsV2."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        size = min(_PAGE, int(query.get("max-keys", _PAGE)))
        contents, prefixes, last = [], [], ""
        truncated = False
        for name in self.keys:
            if not name.startswith(prefix) or name <= after:
                continue
            rest = name[len(prefix) :]
            folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else ""
            if folder and (folder in prefixes[-1:] or after.startswith(folder)):
                last = name
                continue
            if len(contents) + len(prefixes) == size:
                truncated = True
                break
            last = name
            if folder:
                prefixes.append(folder)
            else:
                contents.append(
                    f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{self.etag(name)}</ETag><Size>{len(self.bodies[name])}</Size>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
        more = f"<NextContinuationToken>{last}</NextContinuationToken>" if truncated else ""
        common = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in prefixes)
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(contents) + len(prefixes)}</KeyCount>"
            f"<MaxKeys>{size}</MaxKeys><IsTruncated>{str(truncated).lower()}</IsTruncated>{more}"
            f"{''.join(contents)}{common}</ListBucketResult>"
        ).encode()


class _Connection(asyncio.Protocol):
    """One client. A pipelined request waits in the buffer for its turn."""

    def __init__(self, objects: _Objects, latency: float) -> None:
        self.objects = objects
        self.latency = latency
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            method, target, _ = first.split(" ", 2)
            answer = self.answer(method, target, headers)
            if self.latency and not target.startswith("/__"):
                asyncio.get_running_loop().call_later(self.latency, self.send, answer)
            else:
                self.send(answer)

    def send(self, parts: tuple[bytes, memoryview]) -> None:
        if not self.transport.is_closing():
            self.transport.writelines(parts)

    def answer(self, method: str, target: str, headers: Mapping[str, str]) -> tuple[bytes, memoryview]:
        url = urlsplit(target)
        if url.path == "/__sent__":
            return _answer(200, json.dumps([self.objects.gets, self.objects.sent, time.process_time()]).encode())
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        query = {option: values[0] for option, values in parse_qs(url.query, keep_blank_values=True).items()}
        if method not in {"GET", "HEAD"}:
            return _answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        if bucket != BUCKET or (name and name not in self.objects.bodies):
            return _answer(404, b"<Error><Code>NoSuchKey</Code></Error>", head=method == "HEAD")
        if not name:
            return _answer(200, self.objects.page(query), head=method == "HEAD")
        return self.object(name, headers, head=method == "HEAD")

    def object(self, name: str, headers: Mapping[str, str], *, head: bool) -> tuple[bytes, memoryview]:
        body, etag = self.objects.bodies[name], self.objects.etag(name)
        if headers.get("if-match", etag).strip('"') != etag.strip('"'):
            return _answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", head=head)
        found = _RANGE.fullmatch(headers.get("range", ""))
        start, end = 0, len(body)
        if found:
            start, end = int(found[1]), min(end, int(found[2] or len(body)) + 1)
        more = f"ETag: {etag}\r\nLast-Modified: {_DATE}\r\nAccept-Ranges: bytes\r\n"
        if found:
            more += f"Content-Range: bytes {start}-{end - 1}/{len(body)}\r\n"
        if not head:
            self.objects.gets += 1
            self.objects.sent += end - start
        return _answer(206 if found else 200, memoryview(body)[start:end], more, head=head)


def _answer(
    status: int, body: bytes | memoryview, more: str = "", *, head: bool = False
) -> tuple[bytes, bytes | memoryview]:
    kind = "application/octet-stream" if more else "application/xml"
    lines = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\nContent-Type: {kind}\r\n{more}\r\n".encode()
    return lines, b"" if head else body


async def _serve(folders: Mapping[str, tuple[int, int]], latencies: Sequence[float]) -> None:
    loop, objects = asyncio.get_running_loop(), _Objects(folders)
    servers = [
        await loop.create_server(lambda latency=latency: _Connection(objects, latency), "127.0.0.1", 0, backlog=1024)
        for latency in latencies
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*json.loads(sys.argv[1])))
