"""A store with latency on this machine: an fsspec filesystem over a local folder that waits before it answers.

``latency:///folder`` waits for ``AIRDATA_BENCH_LATENCY`` seconds before the first byte of each read and before each
answer about a file, as an object store does, and notes each read in the file that ``AIRDATA_BENCH_READS`` names. The
bytes themselves come from the page cache: what is measured is latency, not bandwidth. Importing this module registers
the filesystem in a process and in those forked from it.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

LATENCY, READS = "AIRDATA_BENCH_LATENCY", "AIRDATA_BENCH_READS"
_LISTED_AT_ONCE = 1000


class LatencyFileSystem(AbstractFileSystem):
    """Reads files of a local folder, slowly to begin with."""

    protocol = "latency"
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002 - fsspec's signature
        wait()
        with os.scandir(self._strip_protocol(path)) as entries:
            found = [_info(entry.path, entry.stat(), folder=entry.is_dir()) for entry in entries]
        return found if detail else [entry["name"] for entry in found]

    def find(self, path: str, **options: Any) -> Any:
        """Every file below, a thousand for each request, as object stores list."""
        found = {}
        for folder, _folders, names in os.walk(self._strip_protocol(path)):
            for name in names:
                full = os.path.join(folder, name)
                found[full] = _info(full, os.stat(full), folder=False)
        for _request in range(1 + len(found) // _LISTED_AT_ONCE):
            wait()
        return found if options.get("detail") else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        wait()
        name = self._strip_protocol(path)
        return _info(name, os.stat(name), folder=os.path.isdir(name))

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        self._note(rpath)
        shutil.copyfile(self._strip_protocol(rpath), lpath)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._note(path)
        with open(self._strip_protocol(path), "rb") as file:
            return file.read()[start:end]

    def _note(self, path: str) -> None:
        wait()
        if log := os.environ.get(READS):
            file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(file, f"{path}\n".encode())
            os.close(file)


def wait() -> None:
    """The time to the first byte."""
    time.sleep(float(os.environ[LATENCY]))


def reads(log: str) -> list[str]:
    """Every read so far, by path."""
    if not os.path.exists(log):
        return []
    with open(log, encoding="utf-8") as lines:
        return lines.read().splitlines()


def _info(name: str, stat: os.stat_result, *, folder: bool) -> dict[str, Any]:
    return {
        "name": name,
        "size": 0 if folder else stat.st_size,
        "type": "directory" if folder else "file",
        "mtime": stat.st_mtime,
    }


fsspec.register_implementation("latency", LatencyFileSystem, clobber=True)
