"""Every URL that fsspec has a driver for: s3, gs, abfs, http, memory, sftp and more."""

from __future__ import annotations

import importlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from airdata.errors import TransferError, VolumeError
from airdata.transport import FileInfo, check_ranges, check_version
from airdata.transport.retry import DEFAULT_RETRY, Retry
from airdata.volume import Volume, safe_url

__all__ = ["FsspecTransport"]

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}


class FsspecTransport:
    """The verbs of :class:`airdata.transport.Transport` on an fsspec filesystem.

    The filesystem is opened at the first verb of each process: its event loop and connections do not survive a fork
    (s3fs#914, gcsfs#379), so nothing of it is ever carried across one or pickled.
    """

    def __init__(self, volume: Volume, retry: Retry = DEFAULT_RETRY) -> None:
        self.volume = volume
        self._retry = retry
        self._opened: tuple[int, Any, str] | None = None  # (pid, filesystem, root path without the scheme)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _open(self) -> tuple[Any, str]:
        if self._opened is None or self._opened[0] != os.getpid():
            url_to_fs = importlib.import_module("fsspec.core").url_to_fs
            try:
                filesystem, root = url_to_fs(self.volume.url, use_listings_cache=False, **self.volume.storage_options)
            except (ImportError, ValueError) as error:
                scheme = self.volume.url.split("://", 1)[0]
                extra = _EXTRAS.get(scheme)
                remedy = f"pip install 'airdata[{extra}]'" if extra else "install an fsspec driver for this scheme"
                raise VolumeError(
                    f"{safe_url(self.volume.url)}: no driver for {scheme}://: {error}; {remedy}"
                ) from error
            self._opened = (os.getpid(), filesystem, root.rstrip("/"))
        return self._opened[1], self._opened[2]

    def _full(self, path: str) -> str:
        root = self._open()[1]
        return f"{root}/{path}" if path else root

    def _name(self, path: str) -> str:
        return safe_url(self.volume.join(path))

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        filesystem, root = self._open()
        full = self._full(prefix)

        def find() -> dict[str, dict[str, Any]]:
            try:
                found: dict[str, dict[str, Any]] = filesystem.find(full, detail=True, withdirs=False)
            except FileNotFoundError:
                return {}
            return found

        for name, info in self._retry.call(f"listing {self._name(prefix)}", find).items():
            relative = filesystem._strip_protocol(name)[len(root) :].lstrip("/")  # noqa: SLF001 - fsspec's own verb
            # A store may show a "folder" as an empty object whose name ends with a slash.
            if relative and not relative.endswith("/") and info.get("type", "file") == "file":
                yield FileInfo(relative, int(info.get("size") or 0), _version(info))

    def directories(self, prefix: str = "") -> Sequence[str]:
        filesystem, _ = self._open()
        full = self._full(prefix)

        def children() -> Sequence[dict[str, Any]]:
            try:
                found: Sequence[dict[str, Any]] = filesystem.ls(full, detail=True)
            except FileNotFoundError:
                return []
            return found

        entries = self._retry.call(f"listing {self._name(prefix)}", children)
        return sorted({posixpath.basename(e["name"].rstrip("/")) for e in entries if e["type"] == "directory"})

    def stat(self, path: str) -> FileInfo:
        filesystem, _ = self._open()
        full = self._full(path)
        info = self._retry.call(f"stat of {self._name(path)}", lambda: filesystem.info(full))
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{self._name(path)} is a folder")
        return FileInfo(path, int(info.get("size") or 0), _version(info))

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "") -> int:
        filesystem, _ = self._open()
        full = self._full(path)
        self._retry.call(f"reading {self._name(path)}", lambda: filesystem.get_file(full, os.fspath(destination)))
        if version:  # fsspec has no conditional read, so its price is a second request
            check_version(self._name(path), self.stat(path), version)
        return os.path.getsize(destination)

    def read(self, path: str) -> bytes:
        filesystem, _ = self._open()
        full = self._full(path)
        return bytes(self._retry.call(f"reading {self._name(path)}", lambda: filesystem.cat_file(full)))

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        filesystem, _ = self._open()
        full = self._full(path)
        # To some drivers (s3fs) an empty range means the whole object, so those are not asked for.
        wanted = [(start, end) for start, end in ranges if end > start]
        starts, ends = [start for start, _ in wanted], [end for _, end in wanted]
        parts = iter(
            self._retry.call(
                f"reading {self._name(path)}",
                lambda: filesystem.cat_ranges([full] * len(wanted), starts, ends, on_error="raise"),
            )
        )
        return check_ranges(self._name(path), ranges, [next(parts) if end > start else b"" for start, end in ranges])

    def put(self, path: str, source: bytes | os.PathLike[str]) -> None:
        filesystem, _ = self._open()
        full = self._full(path)
        if isinstance(source, bytes):
            self._retry.call(f"writing {self._name(path)}", lambda: filesystem.pipe_file(full, source))
            expected = len(source)
        else:
            self._retry.call(f"writing {self._name(path)}", lambda: filesystem.put_file(os.fspath(source), full))
            expected = os.path.getsize(source)
        size = self.stat(path).size
        if size != expected:
            raise TransferError(f"{self._name(path)}: {expected} bytes were sent and the store holds {size}")

    def delete(self, path: str) -> None:
        filesystem, _ = self._open()
        full = self._full(path)

        def remove() -> None:
            try:
                filesystem.rm_file(full)
            except FileNotFoundError:
                return

        self._retry.call(f"removing {self._name(path)}", remove)


def _version(info: dict[str, Any]) -> str:
    """What the store tells of a file's version: the strongest token it offers, tagged with its kind."""
    for kind, keys in {
        "etag": ("ETag", "etag", "e_tag"),
        "generation": ("generation",),
        "mtime": ("mtime", "LastModified", "last_modified", "updated", "created"),
    }.items():
        for key in keys:
            value = info.get(key)
            if value:
                # A driver may tell the time as a number in one verb and as a date in another; a version is one string.
                value = f"{value.timestamp():.6f}" if isinstance(value, datetime) else value
                value = f"{value:.6f}" if isinstance(value, float) else value
                return f"{kind}:{str(value).strip(chr(34))}"
    return ""
