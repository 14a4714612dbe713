"""Servers that misbehave, for the tests of this directory."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what is a module of tests and a program of theirs


@pytest.fixture
def s3_proxy(s3_endpoint: str, fault_proxy: Any) -> Iterator[Any]:
    """A ``FaultProxy`` (see proxy.py) before the S3 server of the session."""
    proxy = fault_proxy.start(s3_endpoint.removeprefix("http://"))
    try:
        yield proxy
    finally:
        proxy.stop()


@dataclass
class WebDirectory:
    """A directory, and the address at which it is served."""

    path: Path
    url: str


@pytest.fixture(scope="module")
def web_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDirectory]:
    """A directory that a plain web server serves; it knows neither ranges nor entity tags."""
    directory = tmp_path_factory.mktemp("web")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(directory))

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield WebDirectory(directory, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
