"""Servers and files that tests of every room share."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
def free_ports() -> Callable[[int], list[int]]:
    """Ports for servers that must be told theirs: nothing listens on them, and nothing else will.

    A port that the kernel chose, and that was given back, may serve the next connection of any process before its
    server starts. These lie below those that the kernel chooses from (RFC 6056, on Linux from 32768), and no two
    workers of a test run share one.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    ports = itertools.cycle(range(12000 + 1000 * worker, 13000 + 1000 * worker))
    for _ in range(os.getpid() % 1000):  # other runs on this machine begin elsewhere
        next(ports)

    def free(port: int) -> bool:
        try:
            socket.create_server(("0.0.0.0", port)).close()
        except OSError:
            return False
        return True

    return lambda count: list(itertools.islice(filter(free, ports), count))


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]) -> Iterator[str]:
    """The address of a real S3 API server (moto) in a process of its own."""
    (port,) = free_ports(1)
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
        _wait_for(server, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while not _accepts(port):
        assert server.poll() is None, f"the server ended at once: {log.read_text()}"
        assert time.monotonic() < deadline, f"the server did not start: {log.read_text()}"
        time.sleep(0.05)


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


_AZURITE = Path(__file__).parent.parent / ".servers/node_modules/azurite/dist/src/blob/main.js"
_AZURITE_ACCOUNT = "devstoreaccount1"
# Published with Azurite, the same everywhere, and good for nothing else.
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]) -> Iterator[str]:
    """The address of a real Azure Blob API server (Azurite) in a process of its own."""
    if shutil.which("node") is None:
        pytest.skip("Azurite needs node, which is not installed")
    if not _AZURITE.exists():
        pytest.skip("Azurite is not installed: npm install --prefix .servers azurite@3.35.0")
    pytest.importorskip("adlfs")
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("azure") / "server.log"
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    quiet = ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with log.open("wb") as output:
        server = subprocess.Popen(["node", str(_AZURITE), *place, *quiet], stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for(server, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def azure_connection() -> Callable[[str], str]:
    """The connection string of a server at an address."""

    def connect(endpoint: str) -> str:
        facts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": _AZURITE_ACCOUNT,
            "AccountKey": _AZURITE_KEY,
            "BlobEndpoint": f"{endpoint}/{_AZURITE_ACCOUNT}",
        }
        return ";".join(f"{name}={value}" for name, value in facts.items())

    return connect


@pytest.fixture
def azure_volume(azure_endpoint: str, azure_connection: Callable[[str], str]) -> Volume:
    """An empty folder in a container of its own on the Azure server."""
    from adlfs import AzureBlobFileSystem

    options = {"connection_string": azure_connection(azure_endpoint)}
    container = f"container-{os.getpid()}-{next(_bucket_numbers)}"
    AzureBlobFileSystem(**options, skip_instance_cache=True).mkdir(container)
    return Volume.of(f"abfs://{container}/data", options)


@pytest.fixture(scope="session")
def fault_proxy() -> Any:
    """The class of ``faults/proxy.py``, of which each instance is a running proxy."""
    name = "airdata_tests_fault_proxy"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "faults/proxy.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].FaultProxy


@pytest.fixture(scope="module")
def proxy_of(fault_proxy: Any) -> Iterator[Callable[[str], Any]]:
    """Start a proxy before the HTTP server of a URL; it lives as long as the tests of the module."""
    started: list[Any] = []

    def start(url: str) -> Any:
        started.append(fault_proxy.start(url.removeprefix("http://")))
        return started[-1]

    yield start
    for proxy in started:
        proxy.stop()


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
