"""S3, Google Cloud Storage, Azure and HTTP through obstore, with fsspec behind it.

    verb ──► may obstore run here? ── no ─────────────────────────────► fsspec
                 │ yes                                                    ▲
                 ▼                                                        │
             obstore ── transient: tries again, a few times ──► still ────┤
                     ── throttled, permanent, a key it cannot name ───────┘

A GET of 16 KiB costs 0.11 ms of CPU through obstore and 1.64 ms through s3fs: on small files that is the difference
between one core and many. fsspec has the last word on every failure: it sees what a throttling server asks for
(obstore does not show headers of an error), and its messages are the ones its users know.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from airdata.errors import SourceChangedError, TransferError
from airdata.transport import FileInfo, check_ranges, check_version, runtime
from airdata.transport.chains import CHAINS
from airdata.transport.clients import Clients
from airdata.transport.drivers import OBJECT_STORES
from airdata.transport.failures import Failure, classify, describe, is_throttled
from airdata.transport.markers import files_among, names_folder
from airdata.transport.parts import LARGE_BYTES, exactly, write_whole, written_so_far
from airdata.transport.remote import FsspecTransport
from airdata.transport.retry import DEFAULT_RETRY, Deed, Retry
from airdata.transport.store_options import StorePlan, plan_store
from airdata.transport.versions import condition, obstore_info
from airdata.volume import Volume, safe_url

__all__ = ["ObjectTransport"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_CHUNK_BYTES = 8 << 20
_PAGE_KEYS = 1000
_TRIES = 3
_GIVE_UP_AFTER = 3
# fsspec takes a path of a URL as already quoted and obstore quotes it, so only paths that need none are the same.
_PLAIN_HTTP = re.compile(r"[A-Za-z0-9._~/-]*")


class ObjectTransport(FsspecTransport):
    """The frequent verbs of :class:`airdata.transport.Transport` by obstore, and everything else by fsspec."""

    def __init__(self, volume: Volume, retry: Retry = DEFAULT_RETRY, *, everywhere: bool = False) -> None:
        """Make a transport.

        Args:
            volume: a volume in an object store or on an HTTP server.
            retry: see :class:`airdata.transport.Retry`.
            everywhere: use obstore in any process, not just where none can be forked. Children forked from a process
                that has used it have to do without.
        """
        super().__init__(volume, retry)
        self._everywhere = everywhere
        self._stores: Clients[Any] = Clients()
        self._given_up = False
        self._failures = 0

    @staticmethod
    def available() -> bool:
        """Whether obstore is installed."""
        return importlib.util.find_spec("obstore") is not None

    @property
    def lists(self) -> bool:
        """Whether obstore lists this volume with the versions that fsspec shows."""
        plan = self._plan()
        return plan is not None and plan.lists

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        def whole(store: Any) -> list[FileInfo]:
            return [file for page in self._pages(store, prefix) for file in page]

        def general() -> list[FileInfo]:
            return [*super(ObjectTransport, self).list(prefix)]

        return iter(self._fast("listing", prefix, whole, general) if self.lists else general())

    def pages(self, prefix: str = "") -> Iterator[Sequence[FileInfo]]:
        """Every file below a folder, as the pages come, by obstore alone.

        A page that fails is asked for again, and the listing goes on from where it was.

        Raises:
            TransferError: obstore does not list this volume, or not in this process, or it failed.
        """
        store = self._store() if self.lists else None
        if store is None:
            raise TransferError(f"{self._name(prefix)}: obstore cannot list it")
        return self._pages(store, prefix)

    def stat(self, path: str) -> FileInfo:
        if not self.lists:
            return super().stat(path)
        return self._fast(
            "stat of",
            path,
            lambda s: obstore_info(_obstore().head(s, path)),
            lambda: super(ObjectTransport, self).stat(path),
        )

    def read(self, path: str) -> bytes:
        return self._whole(path, "")

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        def parts(store: Any) -> Sequence[bytes]:
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            found = _obstore().get_ranges(store, path, starts=starts, ends=ends, coalesce=0)
            return check_ranges(self._name(path), ranges, [bytes(part) for part in found])

        return self._fast("reading", path, parts, lambda: super(ObjectTransport, self).read_ranges(path, ranges))

    def _pages(self, store: Any, prefix: str) -> Iterator[Sequence[FileInfo]]:
        last: str | None = None
        stream: Any = None
        seen = {prefix.rstrip("/")}  # of this name there can only be the folder's own marker

        def page() -> Sequence[Mapping[str, Any]]:
            nonlocal stream
            try:
                if stream is None:
                    options = {"offset": last, "chunk_size": _PAGE_KEYS}
                    stream = _obstore().list(store, prefix=prefix or None, **options)
                return next(stream, ())
            except Exception:
                stream = None
                raise

        while metas := self._retry.call(Deed("listing", self.volume, prefix), page, again=self._count):
            files = files_among(map(obstore_info, metas), lambda path: self._empty_file(store, path), seen)
            # Never the name of a marker: without its slash it lies before files that have been listed.
            last = files[-1].path if files else last
            yield files

    def _empty_file(self, store: Any, path: str) -> FileInfo | None:
        def look() -> FileInfo | None:
            answer = _obstore().get(store, path, options={"head": True})
            return None if answer.meta["size"] or names_folder(answer.attributes) else obstore_info(answer.meta)

        try:
            return self._retry.call(Deed("stat of", self.volume, path), look, again=self._count)
        except FileNotFoundError:
            return None

    def _get_stream(self, path: str, destination: str | os.PathLike[str], version: str) -> int:
        large: FileInfo | None = None

        def download(store: Any) -> int:
            nonlocal large
            result = _obstore().get(store, path, options=condition(version))
            found = obstore_info(result.meta)
            if found.size >= LARGE_BYTES and self._scheme in OBJECT_STORES:
                large = found  # nobody told its size; the rest of this answer is not waited for
                return 0
            self._check_answer(path, found, version)
            if found.size <= _CHUNK_BYTES:
                written = write_whole(destination, result.bytes())
            else:
                with open(destination, "wb") as target:
                    target.writelines(result.stream(min_chunk_size=_CHUNK_BYTES))
                    written = target.tell()
            if written != found.size:
                raise ConnectionError(f"{found.size} bytes were announced and {written} came")
            return written

        def general() -> int:
            return super(ObjectTransport, self)._get_stream(path, destination, version)

        size = self._fast("reading", path, download, general, lambda: written_so_far(destination))
        if large is None:
            return size
        return self._get_in_parts(path, destination, version or large.version, large.size)

    def _whole(self, path: str, version: str) -> bytes:
        def content(store: Any) -> bytes:
            result = _obstore().get(store, path, options=condition(version))
            self._check_answer(path, obstore_info(result.meta), version)
            return bytes(result.bytes())

        return self._fast("reading", path, content, lambda: super(ObjectTransport, self)._whole(path, version))

    def _part(self, path: str, part: tuple[int, int], version: str, moved: Callable[[], int]) -> Any:
        def read(store: Any) -> Any:
            result = _obstore().get(store, path, options={**(condition(version) or {}), "range": part})
            return exactly(result.bytes(), *part)

        return self._fast(
            "reading", path, read, lambda: super(ObjectTransport, self)._part(path, part, version, moved), moved
        )

    def _check_answer(self, path: str, found: FileInfo, version: str) -> None:
        """Refuse an answer that holds another version; free, since the answer names its own."""
        if version.split(":", 1)[0] == found.version.split(":", 1)[0]:
            check_version(self._name(path), found, version)
        else:  # the two clients call it by different names
            self._check_version(path, version)

    def _fast(
        self,
        verb: str,
        path: str,
        use: Callable[[Any], T],
        general: Callable[[], T],
        progress: Callable[[], int] | None = None,
    ) -> T:
        """Do it with obstore if that works, and otherwise as fsspec does it."""
        store = self._store() if self._scheme not in {"http", "https"} or _PLAIN_HTTP.fullmatch(path) else None
        if store is None:
            return general()
        tries, given_up = 0, None

        def attempt() -> T | None:
            nonlocal store, tries, given_up
            store = self._stores.get(self._open_store)
            tries += 1
            try:
                answer = use(store)
            except Exception as error:
                if isinstance(error, FileNotFoundError) or (tries < _TRIES and self._may_recover(error, store)):
                    raise
                given_up = error
                return None
            self._stores.proved(store)
            return answer

        answer = self._retry.call(
            Deed(verb, self.volume, path),
            attempt,
            renew=lambda: self._stores.renew(store, self._open_store),
            progress=progress,
            again=self._count,
        )
        if given_up is None:
            return answer  # type: ignore[return-value]
        self._count()
        last_word = general()
        self._note_failure(given_up, store)
        return last_word

    def _may_recover(self, error: Exception, store: Any) -> bool:
        """Whether obstore should try again, rather than fsspec."""
        if isinstance(error, TransferError):
            return isinstance(error, SourceChangedError)
        failure = classify(error)
        if failure is Failure.AUTH:
            return self._stores.is_proven(store)
        return failure is Failure.CHANGED or (failure is Failure.TRANSIENT and not is_throttled(error))

    def _note_failure(self, error: Exception, store: Any) -> None:
        """What obstore could not do fsspec did; a store with which nothing has ever worked is given up."""
        if isinstance(error, ValueError) or is_throttled(error) or self._stores.is_proven(store):
            return
        self._failures += 1
        if self._failures == _GIVE_UP_AFTER:
            _log.warning(
                "%s: obstore keeps failing where fsspec succeeds, so fsspec is used from now on: %s",
                safe_url(self.volume.url),
                describe(error)[:300],
            )
            self._given_up = True

    def _store(self) -> Any:
        """This process's store; None where obstore must not run, or finds no credentials."""
        if self._given_up or not runtime.usable(anywhere=self._everywhere):
            return None
        try:
            return self._stores.get(self._open_store)
        except (ImportError, LookupError):
            self._given_up = True
            return None

    def _plan(self) -> StorePlan | None:
        """Made anew from this process's environment and never kept: what it holds must not be in a pickle."""
        return None if self._given_up else plan_store(self.volume.url, self.volume.storage_options, os.environ)

    def _open_store(self) -> Any:
        plan = self._plan()
        if plan is None:
            raise LookupError("obstore cannot do what is asked of the driver, or has been given up")
        arguments = dict(plan.arguments)
        if plan.chain:
            found = CHAINS[plan.chain]()
            if found is None:
                raise LookupError(f"the {plan.chain} chain has no credentials")
            provider, facts = found
            arguments = {**facts, **arguments, "credential_provider": provider}
        if plan.kind == "S3Store":
            arguments.setdefault("region", "us-east-1")
        runtime.note_use()
        return getattr(importlib.import_module("obstore.store"), plan.kind)(**arguments)


def _obstore() -> Any:
    return importlib.import_module("obstore")
