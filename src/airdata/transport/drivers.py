"""What we ask of fsspec's drivers beyond their defaults: time-outs on every read, and no retries of their own.

Retries are made in one place (:mod:`airdata.transport.retry`), where they have one deadline and are counted. A driver
that also retries multiplies them, sleeps where nobody sees it, and ignores what the server asks. What the user has set
in ``storage_options`` is left as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

__all__ = ["CONNECT_SECONDS", "OBJECT_STORES", "READ_SECONDS", "driver_options", "extra_for", "without_own_retries"]

CONNECT_SECONDS = 5
# Without a byte; a slow answer may take as long as it likes.
READ_SECONDS = 15

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
OBJECT_STORES = frozenset(_EXTRAS)


def extra_for(scheme: str) -> str | None:
    """The extra of this package that brings the driver of a scheme."""
    return _EXTRAS.get(scheme)


def driver_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options of a driver, with ours where the user has none."""
    ours: dict[str, Any] = {}
    extra = _EXTRAS.get(scheme)
    if extra == "s3":
        config = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},
        }
        ours["config_kwargs"] = {**config, **(options.get("config_kwargs") or {})}
    elif extra == "azure":
        ours = {"connection_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
    elif extra == "gcs":
        ours["requests_timeout"] = _aiohttp_timeout()
    elif scheme in {"http", "https"}:
        # aiohttp's own limit is five minutes for the whole answer, however well a large file moves.
        ours["client_kwargs"] = {"timeout": _aiohttp_timeout(), **(options.get("client_kwargs") or {})}
    merged = {"config_kwargs", "client_kwargs"} & ours.keys()
    return {**ours, **{name: value for name, value in options.items() if name not in merged}}


def without_own_retries(filesystem: Any) -> Any:
    """The filesystem, told to try once."""
    if "s3" in _protocols(filesystem):
        filesystem.retries = 1
    elif "abfs" in _protocols(filesystem):
        # azure-storage takes a policy at construction only, where adlfs does not let one through.
        policy: Any = getattr(getattr(filesystem.service_client, "_config", None), "retry_policy", None)
        if policy is not None:
            policy.total_retries = 0
    return filesystem


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _aiohttp_timeout() -> Any:
    return importlib.import_module("aiohttp").ClientTimeout(
        total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
    )
