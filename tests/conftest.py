"""Servers and files that tests of every room share."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airdata.volume import Volume

_bucket_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches, run directories and tracking stores of a test never touch those of the person who runs it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("AIRDATA_CACHE_DIR", str(home / "cache"))
    monkeypatch.setenv("AIRDIST_RUN_DIR", str(home / "runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    for name in ("AIRDATA_VOLUMES", "AIRDATA_CACHE_BYTES", "AIRDATA_MIN_FREE_BYTES", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real S3 API server (moto) in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("s3") / "server.log"
    environ = {**os.environ, "MOTO_PORT": str(port)}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )
    try:
        deadline = time.monotonic() + 60
        while not _accepts(port):
            assert server.poll() is None, f"the S3 server ended at once: {log.read_text()}"
            assert time.monotonic() < deadline, f"the S3 server did not start: {log.read_text()}"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture
def s3_volume(s3_endpoint: str) -> Volume:
    """An empty prefix in a bucket of its own on the S3 server."""
    from s3fs import S3FileSystem

    options = {"key": "test", "secret": "test", "endpoint_url": s3_endpoint}
    bucket = f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
    S3FileSystem(**options, skip_instance_cache=True).mkdir(bucket)
    return Volume.of(f"s3://{bucket}/data", options)


@pytest.fixture
def make_files() -> Callable[..., dict[str, bytes]]:
    """Write small files with known, distinct content into a directory; returns content by relative path."""

    def make(directory: Path, count: int, *, folders: int = 3, size: int = 100) -> dict[str, bytes]:
        contents = {}
        for number in range(count):
            relative = f"class{number % folders}/file{number:05d}.bin"
            content = f"{relative}:".encode() + bytes([number % 251]) * size
            path = directory / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            contents[relative] = content
        return contents

    return make
