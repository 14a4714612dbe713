"""Every URL that fsspec has a driver for: s3, gs, abfs, http, memory, sftp and more."""

from __future__ import annotations

import importlib
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from airdata.errors import SourceChangedError, TransferError, VolumeError
from airdata.transport import FileInfo, check_ranges, check_version
from airdata.transport.clients import Clients
from airdata.transport.drivers import OBJECT_STORES, driver_options, extra_for, without_own_retries
from airdata.transport.hedge import HEDGED_BYTES, Hedge
from airdata.transport.markers import files_among
from airdata.transport.parts import LARGE_BYTES, exactly, fetch_parts, write_whole, written_so_far
from airdata.transport.retry import DEFAULT_RETRY, Deed, Retry, describe
from airdata.transport.versions import fsspec_info
from airdata.volume import Volume, safe_url

__all__ = ["FsspecTransport"]

T = TypeVar("T")


class FsspecTransport:
    """The verbs of :class:`airdata.transport.Transport` on an fsspec filesystem.

    The filesystem is opened at the first verb of each process, see :class:`airdata.transport.clients.Clients`.
    """

    def __init__(self, volume: Volume, retry: Retry = DEFAULT_RETRY) -> None:
        self.volume = volume
        self.retries = 0
        self._retry = retry
        self._clients: Clients[tuple[Any, str]] = Clients()  # (filesystem, root path without the scheme)
        self._hedge: Hedge[Any] | None = Hedge(volume.hedge_seconds) if volume.hedge_seconds > 0 else None
        self._scheme = volume.url.split("://", 1)[0].lower()

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        def find(filesystem: Any, full: str) -> list[FileInfo]:
            try:
                found = filesystem.find(full, detail=True, withdirs=False)
            except FileNotFoundError:
                return []
            root = full[: len(full) - len(prefix)] if prefix else full
            files = []
            for name, info in found.items():
                # Asked of the name as it is, since _strip_protocol drops the slash that makes it a folder's marker.
                if name.endswith("/") or info.get("type", "file") != "file":
                    continue
                relative = filesystem._strip_protocol(name)[len(root) :].lstrip("/")  # noqa: SLF001 - fsspec's own verb
                if relative:
                    files.append(fsspec_info(relative, info))
            return files

        files = self._call("listing", prefix, find)
        # adlfs drops the slash before we see it.
        yield from files_among(files, self._file_at, {prefix}) if extra_for(self._scheme) == "azure" else files

    def _file_at(self, path: str) -> FileInfo | None:
        try:
            return FsspecTransport.stat(self, path)
        except FileNotFoundError:
            return None

    def directories(self, prefix: str = "") -> Sequence[str]:
        def children(filesystem: Any, full: str) -> Sequence[dict[str, Any]]:
            try:
                found: Sequence[dict[str, Any]] = filesystem.ls(full, detail=True)
            except FileNotFoundError:
                return []
            return found

        entries = self._call("listing", prefix, children)
        return sorted({posixpath.basename(e["name"].rstrip("/")) for e in entries if e["type"] == "directory"})

    def stat(self, path: str) -> FileInfo:
        info = self._call("stat of", path, lambda filesystem, full: filesystem.info(full))
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{self._name(path)} is a folder")
        return fsspec_info(path, info)

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "", size: int = -1) -> int:
        if size >= LARGE_BYTES and self._scheme in OBJECT_STORES:
            return self._get_in_parts(path, destination, version, size)
        if self._hedge is not None and 0 <= size <= HEDGED_BYTES:
            content = self._hedge.first(lambda: self._whole(path, version))
            return write_whole(destination, content)
        return self._get_stream(path, destination, version)

    def read(self, path: str) -> bytes:
        return self._whole(path, "")

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        # To some drivers (s3fs) an empty range means the whole object, so those are not asked for.
        parts: dict[tuple[int, int], bytes] = {wanted: b"" for wanted in ranges if wanted[1] <= wanted[0]}

        def missing(filesystem: Any, full: str) -> None:
            wanted = [part for part in dict.fromkeys(ranges) if part not in parts]
            if not wanted:
                return
            starts, ends = [start for start, _ in wanted], [end for _, end in wanted]
            found = filesystem.cat_ranges([full] * len(wanted), starts, ends, on_error="return")
            parts.update({part: got for part, got in zip(wanted, found, strict=True) if isinstance(got, bytes)})
            failures = [got for got in found if isinstance(got, BaseException)]
            if failures:
                raise failures[0]

        self._call("reading", path, missing, lambda: sum(map(len, parts.values())))
        return check_ranges(self._name(path), ranges, [parts[wanted] for wanted in ranges])

    def put(self, path: str, source: bytes | os.PathLike[str]) -> None:
        if isinstance(source, bytes):
            self._call("writing", path, lambda filesystem, full: filesystem.pipe_file(full, source))
            expected = len(source)
        else:
            self._put_file(path, os.fspath(source))
            expected = os.path.getsize(source)
        size = self.stat(path).size
        if size != expected:
            raise TransferError(f"{self._name(path)}: {expected} bytes were sent and the store holds {size}")

    def _put_file(self, path: str, local: str) -> None:
        sent: Any = None

        def upload(filesystem: Any, full: str) -> None:
            nonlocal sent
            sent = importlib.import_module("fsspec.callbacks").Callback()  # each attempt starts from nothing
            filesystem.put_file(local, full, callback=sent)

        self._call("writing", path, upload, lambda: 0 if sent is None else sent.value)

    def delete(self, path: str) -> None:
        def remove(filesystem: Any, full: str) -> None:
            try:
                filesystem.rm_file(full)
            except FileNotFoundError:
                return

        self._call("removing", path, remove)

    def _call(self, verb: str, path: str, use: Callable[[Any, str], T], progress: Callable[[], int] | None = None) -> T:
        """``use(filesystem, full path)`` until it succeeds or fails for good."""
        used: tuple[Any, str] | None = None

        def attempt() -> T:
            nonlocal used
            used = self._clients.get(self._connect)
            filesystem, root = used
            answer = use(filesystem, f"{root}/{path}" if path else root)
            self._clients.proved(used)
            return answer

        def renew() -> bool:
            return used is not None and self._clients.renew(used, lambda: self._connect(anew=True))

        what = Deed(verb, self.volume, path)
        return self._retry.call(what, attempt, renew=renew, progress=progress, again=self._count)

    def _connect(self, *, anew: bool = False) -> tuple[Any, str]:
        url_to_fs = importlib.import_module("fsspec.core").url_to_fs
        try:
            options = driver_options(self._scheme, self.volume.storage_options)
            # fsspec hands out the same filesystem for the same options, with the credentials that have run out.
            fresh = {"skip_instance_cache": True} if anew else {}
            filesystem, root = url_to_fs(self.volume.url, **{"use_listings_cache": False, **options, **fresh})
        except (ImportError, ValueError) as error:
            extra = extra_for(self._scheme)
            if extra and isinstance(error, ValueError):
                problem, remedy = "cannot be opened", "check storage_options and the driver's environment"
            else:
                problem = f"no driver for {self._scheme}://"
                remedy = f"pip install 'airdata[{extra}]'" if extra else "install an fsspec driver for this scheme"
            raise VolumeError(f"{safe_url(self.volume.url)}: {problem}: {describe(error)}; {remedy}") from error
        return without_own_retries(filesystem), root.rstrip("/")

    def _get_stream(self, path: str, destination: str | os.PathLike[str], version: str) -> int:
        def download(filesystem: Any, full: str) -> None:
            filesystem.get_file(full, os.fspath(destination))

        self._call("reading", path, download, lambda: written_so_far(destination))
        self._check_version(path, version)
        return os.path.getsize(destination)

    def _whole(self, path: str, version: str) -> bytes:
        content = bytes(self._call("reading", path, lambda filesystem, full: filesystem.cat_file(full)))
        self._check_version(path, version)
        return content

    def _check_version(self, path: str, version: str) -> None:
        """Refuse bytes just read if the file has been replaced: fsspec has no conditional read."""
        if version:
            check_version(self._name(path), self.stat(path), version)

    def _get_in_parts(self, path: str, destination: str | os.PathLike[str], version: str, size: int) -> int:
        if not version:  # without one to hold on to, parts of two contents could be put together
            found = self.stat(path)
            version = found.version
            if found.size != size:
                raise SourceChangedError(f"{self._name(path)}: it has {found.size} bytes, and {size} were expected")
        fetch_parts(destination, size, lambda part, moved: self._part(path, part, version, moved))
        self._check_version(path, version)
        return size

    def _part(self, path: str, part: tuple[int, int], version: str, moved: Callable[[], int]) -> Any:
        """The bytes of one part, of ``version`` where the client can ask for it."""
        start, end = part

        def read(filesystem: Any, full: str) -> Any:
            data = filesystem.cat_file(full, start=start, end=end)
            if len(data) != end - start:
                self._check_version(path, version)
            return exactly(data, start, end)

        return self._call("reading", path, read, moved)

    def _count(self) -> None:
        self.retries += 1  # one may be lost between threads, which no reader of this number will mind

    def _name(self, path: str) -> str:
        return self.volume.safe_join(path)
