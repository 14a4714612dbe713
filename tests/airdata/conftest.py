"""Directories of small files, sources that count, and programs of their own, for the tests of the data side."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Deadlines fail on a busy machine, and say nothing about the code.
settings.register_profile("airdata", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)  # pytest --hypothesis-profile thorough
settings.load_profile("airdata")


@pytest.fixture
def volume(tmp_path: Path, make_files: Callable[..., dict[str, bytes]]) -> Callable[[int], str]:
    """A directory of so many files."""

    def make(count: int) -> str:
        directory = tmp_path / f"volume{count}"
        directory.mkdir(exist_ok=True)
        make_files(directory, count)
        return str(directory)

    return make


class CountingServer:
    """Serves a directory over HTTP and counts the GETs of each path."""

    def __init__(self, directory: Path) -> None:
        self.gets: Counter[str] = Counter()
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(directory))  # type: ignore[arg-type]

            def do_GET(self) -> None:
                server.gets[self.path.lstrip("/")] += 1
                super().do_GET()

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def counting_server(tmp_path: Path) -> Iterator[Callable[[Path], CountingServer]]:
    """Start servers of directories; they end with the test."""
    servers: list[CountingServer] = []

    def start(directory: Path) -> CountingServer:
        servers.append(CountingServer(directory))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python program of its own: a file, as a user has it, so that spawn finds its classes."""

    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **environ: object) -> subprocess.Popen[str]:
        file = tmp_path / f"program{abs(hash(code))}.py"
        if not file.exists():  # another rank may be reading it, and an empty program ends well
            file.write_text(textwrap.dedent(code))
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore::UserWarning", str(file), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **{name: str(value) for name, value in environ.items()}},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def finish() -> Callable[[subprocess.Popen[str]], str]:
    """What a program printed; fails with its errors when it failed."""

    def wait(process: subprocess.Popen[str], timeout: float = 150) -> str:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it prints the stacks of its threads
            output, errors = process.communicate()
            pytest.fail(f"the program did not end in {timeout} s\n{output}\n{errors}")
        assert process.returncode == 0, f"{output}\n{errors}"
        return output

    return wait


@pytest.fixture
def ranks(program, finish, free_ports) -> Callable[..., list[str]]:
    """Run a program as the ranks of a job, as a launcher does; what each printed."""

    def run(code: str, world: int, *arguments: object) -> list[str]:
        (port,) = free_ports(1)
        launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        processes = [program(code, *arguments, RANK=r, LOCAL_RANK=r, **launch) for r in range(world)]
        return [finish(process) for process in processes]

    return run
