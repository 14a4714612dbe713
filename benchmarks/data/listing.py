"""Listing a bucket: what a dataset does at its start, against s3fs, for many keys and for few.

The server is a process of its own that answers ``ListObjectsV2`` from arithmetic, 1,000 keys a page as S3 does, so that
the client is what is measured. A real bucket adds its latency to each page. Each measurement is a new interpreter, from
its start to the manifest, since a job lists once: imports count.
"""

from __future__ import annotations

import http.server
import itertools
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from report import Table


MANY, SOME, FEW = 1_000_000, 50_000, 100
PAGE = 1000

OURS = """
import sys
from airdata.manifest.patterns import Selection
from airdata.manifest.reading import read_listing
from airdata.transport import open_transport
from airdata.volume import Volume
volume = Volume.of(sys.argv[1], {"key": "k", "secret": "s", "endpoint_url": sys.argv[2]})
print(len(read_listing(open_transport(volume), Selection())))
"""
S3FS = """
import sys
from s3fs import S3FileSystem
print(len(S3FileSystem(key="k", secret="s", endpoint_url=sys.argv[2]).find(sys.argv[1][5:], detail=True)))
"""


class Bucket(http.server.BaseHTTPRequestHandler):
    """The bucket ``n<count>`` holds so many keys, all in the folder ``data``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        count, first = int(url.path.strip("/")[1:]), int(query.get("continuation-token", 0))
        last = min(count, first + PAGE)
        more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < count else ""
        files = "".join(
            f"<Contents><Key>data/class{number // 1000:04d}/image{number:07d}.jpg</Key><Size>{number}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{number:032x}&quot;</ETag>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for number in range(first, last)
        )
        body = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>b</Name><Prefix>data/</Prefix><KeyCount>{last - first}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{files}</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def serve() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    print(server.server_port, flush=True)
    server.serve_forever()


def listing(code: str, count: int, endpoint: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", code, f"s3://n{count}/data", endpoint]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) == count
    return time.perf_counter() - start


def measure(rounds: int = 5) -> Table:
    """The largest listing by ours alone: s3fs would take more than a minute for each."""
    from report import Table, in_turns

    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
    sides = {
        f"{name}, {count:,} keys": lambda code=code, count=count: listing(code, count, endpoint)
        for count, (name, code) in itertools.product((SOME, FEW), (("s3fs", S3FS), ("airdata", OURS)))
    }
    try:
        times = in_turns(rounds, sides)
        times[f"airdata, {MANY:,} keys"] = [listing(OURS, MANY, endpoint)]
    finally:
        server.kill()
        server.wait()
    return Table(
        "listing a bucket, from the start of the interpreter to the manifest",
        times,
        [(f"s3fs, {count:,} keys", f"airdata, {count:,} keys", target) for count, target in ((SOME, 2), (FEW, 0.9))],
        [f"target for {MANY:,} keys: less than 60 s"],
    )


if __name__ == "__main__":
    serve()
