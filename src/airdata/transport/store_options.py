"""The options of an fsspec driver, said in obstore's words.

    ("abfs://c@account.dfs.core.windows.net/x", {"account_key": …}) ──► StorePlan("AzureStore", {"container_name": …})
    an option without a counterpart                                 ──► None: only the fsspec driver does what was asked

Pure functions of URL, options and environment. An option is mapped, known to make no difference to reading, or it is
the end of the matter: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from airdata.transport.drivers import CONNECT_SECONDS, READ_SECONDS

__all__ = ["StorePlan", "plan_store"]


@dataclass(frozen=True)
class StorePlan:
    """How to open a store.

    Attributes:
        kind: the class in ``obstore.store``.
        arguments: of its constructor; they may hold credentials.
        chain: whose chain of credentials finds those that the arguments do not name; "" for none.
        lists: whether a listing shows the same versions as the fsspec driver's.
    """

    kind: str
    arguments: dict[str, Any] = field(repr=False)
    chain: str = ""
    lists: bool = True


_NO_DIFFERENCE = {
    "S3Store": (
        "cache_regions default_block_size default_cache_type default_fill_cache fixed_upload_size max_concurrency "
        "skip_instance_cache use_listings_cache"
    ).split(),
    "GCSStore": (
        "access block_size cache_timeout check_connection consistency default_location project skip_instance_cache "
        "use_listings_cache"
    ).split(),
    "AzureStore": (
        "assume_container_exists blocksize default_cache_type default_fill_cache max_concurrency skip_instance_cache "
        "use_listings_cache"
    ).split(),
    "HTTPStore": "block_size cache_type simple_links skip_instance_cache use_listings_cache".split(),
}
_AZURE_HOST = re.compile(r"(?P<account>[a-z0-9]+)\.(dfs|blob)\.core\.windows\.net")


def plan_store(url: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> StorePlan | None:
    """The obstore store that means the same as a URL and options of an fsspec driver; None when there is none."""
    scheme = url.split("://", 1)[0].lower()
    planners = {
        **dict.fromkeys(("s3", "s3a"), _s3),
        **dict.fromkeys(("gs", "gcs"), _gcs),
        **dict.fromkeys(("abfs", "abfss", "az"), _azure),
        **dict.fromkeys(("http", "https"), _http),
    }
    planner = planners.get(scheme)
    return None if planner is None else planner(url, dict(options), environ)


def _s3(url: str, rest: dict[str, Any], environ: Mapping[str, str]) -> StorePlan | None:
    parts = urlsplit(url)
    client = dict(rest.pop("client_kwargs", None) or {})
    config = dict(rest.pop("config_kwargs", None) or {})
    limits = {name: config.pop(name, None) for name in ("connect_timeout", "read_timeout")}
    endpoint = rest.pop("endpoint_url", None) or client.pop("endpoint_url", None)
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    arguments = {
        "bucket": parts.netloc,
        "prefix": parts.path.strip("/") or None,
        "endpoint": endpoint,
        "region": client.pop("region_name", None),
        "access_key_id": rest.pop("key", None),
        "secret_access_key": rest.pop("secret", None),
        "session_token": rest.pop("token", None),
        "skip_signature": rest.pop("anon", None) or None,
        "request_payer": rest.pop("requester_pays", None) or None,
    }
    named = {"access_key_id", "skip_signature"} & {name for name, value in arguments.items() if value}
    if client or config or not parts.netloc or "@" in parts.netloc:
        return None
    return _plan("S3Store", arguments, rest, endpoint, chain="" if named else "aws", limits=limits)


def _gcs(url: str, rest: dict[str, Any], environ: Mapping[str, str]) -> StorePlan | None:
    parts = urlsplit(url)
    token = rest.pop("token", None)
    endpoint = rest.pop("endpoint_url", None) or environ.get("STORAGE_EMULATOR_HOST") or None
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    arguments = {
        "bucket": parts.netloc,
        "prefix": parts.path.strip("/") or None,
        "base_url": endpoint,
        "skip_signature": True if token == "anon" else None,  # noqa: S105 - the word for having none
    }
    if not parts.netloc or "@" in parts.netloc or token not in (None, "anon", "google_default"):
        return None
    # The XML API, which obstore speaks, does not list generations.
    return _plan("GCSStore", arguments, rest, endpoint, chain="" if token == "anon" else "google", lists=False)  # noqa: S105


def _azure(url: str, rest: dict[str, Any], environ: Mapping[str, str]) -> StorePlan | None:
    place = _azure_place(url)
    connection = rest.pop("connection_string", None) or environ.get("AZURE_STORAGE_CONNECTION_STRING")
    given = {
        name: rest.pop(name, None) or environ.get(f"AZURE_STORAGE_{name.upper()}")
        for name in ("account_name", "account_key", "sas_token", "client_id", "client_secret", "tenant_id")
    }
    host, anonymous = rest.pop("account_host", None), rest.pop("anon", None)
    limits = {"connect_timeout": rest.pop("connection_timeout", None), "read_timeout": rest.pop("read_timeout", None)}
    endpoint = f"https://{host}" if host else None
    if connection:
        facts = _connection_string(connection)
        if facts is None:
            return None
        # What adlfs has in a connection string it takes from nowhere else.
        given = {name: facts.get(name) for name in given}
        endpoint = facts.get("endpoint")
    if place is None or (place[1] and given["account_name"] and place[1] != given["account_name"]):
        return None
    principal = _principal(given).values()
    named = bool(given["account_key"] or given["sas_token"] or all(principal))
    if given["account_key"]:
        given["sas_token"] = None
    elif any(principal) and not all(principal):
        return None
    arguments = {
        "container_name": place[0],
        "prefix": place[2] or None,
        "account_name": given["account_name"] or place[1],
        "account_key": given["account_key"],
        "sas_key": (given["sas_token"] or "").lstrip("?") or None,
        **({} if given["account_key"] or given["sas_token"] else _principal(given)),
        "endpoint": endpoint,
        "skip_signature": True if anonymous and not named else None,
    }
    if not arguments["account_name"] or (anonymous is None and environ.get("AZURE_STORAGE_ANON")):
        return None
    chain = "" if named or anonymous else "azure"
    return _plan("AzureStore", arguments, rest, endpoint, chain=chain, limits=limits)


def _http(url: str, rest: dict[str, Any], environ: Mapping[str, str]) -> StorePlan | None:
    del environ
    parts = urlsplit(url)
    client = dict(rest.pop("client_kwargs", None) or {})
    headers = client.pop("headers", None)
    if client or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    # Listing is WebDAV's in obstore, and links of a page in fsspec; few servers that know the first need the second.
    plan = _plan("HTTPStore", {"url": url}, rest, url, lists=False)
    if plan is not None and headers:
        plan.arguments["client_options"]["default_headers"] = {str(name): str(value) for name, value in headers.items()}
    return plan


def _plan(
    kind: str,
    arguments: Mapping[str, Any],
    rest: Mapping[str, Any],
    endpoint: str | None,
    *,
    chain: str = "",
    lists: bool = True,
    limits: Mapping[str, float | None] = MappingProxyType({}),
) -> StorePlan | None:
    if set(rest) - set(_NO_DIFFERENCE[kind]):
        return None
    client = {
        "connect_timeout": timedelta(seconds=limits.get("connect_timeout") or CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=limits.get("read_timeout") or READ_SECONDS),
        "timeout": timedelta(days=1),  # the whole of an answer, which may be long; read_timeout is what ends a stall
        "allow_http": str(endpoint or "").startswith("http://"),
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    # Tries are counted in one place, airdata.transport.retry.
    return StorePlan(kind, {**given, "client_options": client, "retry_config": {"max_retries": 0}}, chain, lists)


def _azure_place(url: str) -> tuple[str, str, str] | None:
    """Container, account ("" where the URL has none) and prefix."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    container, at, host = parts.netloc.rpartition("@")
    if not at:
        return (host, "", prefix) if host and "." not in host else None
    known = _AZURE_HOST.fullmatch(host)
    return (container, known["account"], prefix) if known and container and ":" not in container else None


def _connection_string(text: str) -> dict[str, str] | None:
    facts = {}
    for pair in text.split(";"):
        name, equals, value = pair.partition("=")
        if equals:
            facts[name.strip().lower()] = value.strip()
    known = {
        "accountname": "account_name",
        "accountkey": "account_key",
        "sharedaccesssignature": "sas_token",
        "blobendpoint": "endpoint",
    }
    found = {word: facts[name] for name, word in known.items() if name in facts}
    if "endpoint" not in found:
        if "account_name" not in found:
            return None
        protocol, suffix = (
            facts.get("defaultendpointsprotocol", "https"),
            facts.get("endpointsuffix", "core.windows.net"),
        )
        found["endpoint"] = f"{protocol}://{found['account_name']}.blob.{suffix}"
    found["endpoint"] = found["endpoint"].rstrip("/")
    return found


def _principal(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("client_id", "client_secret", "tenant_id")}
