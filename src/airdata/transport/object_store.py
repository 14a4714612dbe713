"""S3 through obstore, with fsspec behind it.

A GET of 16 KiB costs 0.11 ms of CPU through obstore and 1.64 ms through s3fs: on small files that is the difference
between one core and many. What the fast path cannot do, the general path does: a key or an option that obstore
does not know, and any failure. So fsspec's retries and messages are the only ones.

Forks: obstore's runtime threads do not survive one, and a child whose parent has made a request would wait for ever,
even with a store of its own (lancedb#3339; measured). Hence the fast path is for loader workers, where the many
small reads are; the process that trains, and forks the workers, keeps to s3fs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from airdata.errors import TransferError
from airdata.transport import FileInfo, check_ranges
from airdata.transport.remote import FsspecTransport
from airdata.transport.retry import DEFAULT_RETRY, Retry, describe
from airdata.volume import Volume, safe_url

__all__ = ["S3Transport", "s3_arguments"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_CHUNK_BYTES = 8 << 20
_CLIENT = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=15),
    "timeout": timedelta(hours=1),
}
_RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
_GIVE_UP_AFTER = 3  # failures in a row which the general path did not share


class _Runtime:
    """Whether obstore has run in this process, and whether it can."""

    used = False
    lost_in_fork = False

    @classmethod
    def after_fork(cls) -> None:
        cls.lost_in_fork = cls.lost_in_fork or cls.used


os.register_at_fork(after_in_child=_Runtime.after_fork)


def s3_arguments(url: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The arguments of obstore's ``S3Store`` that mean the same as a URL and options of s3fs.

    Returns:
        None when there is an option that has no counterpart, so that only s3fs does what was asked.
    """
    parts = urlsplit(url)
    rest = dict(options)
    client = dict(rest.pop("client_kwargs", None) or {})
    endpoint = rest.pop("endpoint_url", None) or client.pop("endpoint_url", None)
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    arguments: dict[str, Any] = {
        "bucket": parts.netloc,
        "prefix": parts.path.strip("/") or None,
        "endpoint": endpoint,
        "region": client.pop("region_name", None),
        "access_key_id": rest.pop("key", None),
        "secret_access_key": rest.pop("secret", None),
        "session_token": rest.pop("token", None),
        "skip_signature": rest.pop("anon", None) or None,
        "client_options": {**_CLIENT, "allow_http": str(endpoint or "").startswith("http://")},
        "retry_config": _RETRY,
    }
    if rest or client or not parts.netloc or "@" in parts.netloc:
        return None
    return {name: value for name, value in arguments.items() if value is not None}


class S3Transport(FsspecTransport):
    """The frequent verbs of :class:`airdata.transport.Transport` by obstore, and everything else by s3fs."""

    def __init__(self, volume: Volume, retry: Retry = DEFAULT_RETRY, *, everywhere: bool = False) -> None:
        """Make a transport.

        Args:
            volume: an ``s3://`` volume.
            retry: of the general path.
            everywhere: use obstore in any process, not just in children of multiprocessing. Children forked from a
                process that has used it are slower.
        """
        super().__init__(volume, retry)
        self._everywhere = everywhere
        self._store: tuple[int, Any] | None = None  # (pid, store)
        self._arguments = s3_arguments(volume.url, volume.storage_options, os.environ)
        self._failures = 0

    @staticmethod
    def available() -> bool:
        """Whether obstore is installed."""
        return importlib.util.find_spec("obstore") is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_store": None, "_failures": 0}

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        def pages(store: Any) -> Sequence[FileInfo]:
            found = _obstore().list(store, prefix=prefix or None, chunk_size=1000)
            return [_info(meta) for page in found for meta in page if not meta["path"].endswith("/")]

        return iter(self._fast(prefix, pages, lambda: [*super(S3Transport, self).list(prefix)]))

    def stat(self, path: str) -> FileInfo:
        return self._fast(
            path, lambda store: _info(_obstore().head(store, path)), lambda: super(S3Transport, self).stat(path)
        )

    def get(self, path: str, destination: str | os.PathLike[str], version: str = "") -> int:
        condition = {"if_match": version.removeprefix("etag:")} if version.startswith("etag:") else None

        def download(store: Any) -> int:
            result = _obstore().get(store, path, options=condition)
            with open(destination, "wb") as target:
                target.writelines(result.stream(min_chunk_size=_CHUNK_BYTES))
                size = target.tell()
            if size != result.meta["size"]:
                raise TransferError(f"{self._name(path)}: {result.meta['size']} bytes were announced and {size} came")
            return size

        return self._fast(path, download, lambda: super(S3Transport, self).get(path, destination, version))

    def read(self, path: str) -> bytes:
        return self._fast(
            path, lambda s: bytes(_obstore().get(s, path).bytes()), lambda: super(S3Transport, self).read(path)
        )

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        def parts(store: Any) -> Sequence[bytes]:
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            found = _obstore().get_ranges(store, path, starts=starts, ends=ends, coalesce=0)
            return check_ranges(self._name(path), ranges, [bytes(part) for part in found])

        return self._fast(path, parts, lambda: super(S3Transport, self).read_ranges(path, ranges))

    def _fast(self, path: str, verb: Callable[[Any], T], general: Callable[[], T]) -> T:
        """Do it with obstore if that works, and otherwise as fsspec does it."""
        store = self._open_store()
        if store is None:
            return general()
        try:
            answer = verb(store)
        except FileNotFoundError as error:
            raise FileNotFoundError(2, f"{self._name(path)}: no such file") from error
        except ValueError:
            return general()  # a key that obstore cannot name, such as one with an empty segment
        except Exception as error:  # noqa: BLE001 - whatever it is, the general path has the last word on it
            answer = general()
            self._failures += 1
            if self._failures == _GIVE_UP_AFTER:
                _log.warning(
                    "%s: obstore keeps failing where s3fs succeeds, so s3fs is used from now on: %s",
                    safe_url(self.volume.url),
                    describe(error)[:300],
                )
                self._arguments = None
            return answer
        self._failures = 0
        return answer

    def _open_store(self) -> Any:
        a_worker = multiprocessing.parent_process() is not None
        if self._arguments is None or _Runtime.lost_in_fork or not (a_worker or self._everywhere):
            return None
        if self._store is None or self._store[0] != os.getpid():
            arguments = dict(self._arguments)
            if "access_key_id" not in arguments and "skip_signature" not in arguments:
                provider, region = _driver_chain()
                if provider is None:
                    return None
                arguments["credential_provider"] = provider
                arguments.setdefault("region", region)
            arguments.setdefault("region", "us-east-1")
            bucket = arguments.pop("bucket")
            self._store = (os.getpid(), importlib.import_module("obstore.store").S3Store(bucket, **arguments))
            _Runtime.used = True
        return self._store[1]


def _obstore() -> Any:
    return importlib.import_module("obstore")


def _info(meta: Mapping[str, Any]) -> FileInfo:
    etag = meta.get("e_tag")
    version = f"etag:{etag.strip(chr(34))}" if etag else f"mtime:{meta['last_modified'].timestamp():.6f}"
    return FileInfo(str(meta["path"]), int(meta["size"]), version)


def _driver_chain() -> tuple[Callable[[], dict[str, Any]] | None, str | None]:
    """Credentials from where s3fs finds them (environment, profiles, roles), renewed when they run out."""
    session = importlib.import_module("botocore.session").Session()
    credentials = session.get_credentials()
    if credentials is None:
        return None, None

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # renews by itself what is about to expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return provide, session.get_config_variable("region")
