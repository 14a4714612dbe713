"""Credentials from where the fsspec drivers look for them, in the form obstore asks for.

Each chain reads environment, files, roles and metadata services anew when it is made; what it returns knows when it
expires, and obstore asks again before that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

__all__ = ["CHAINS"]

Provider = Callable[[], dict[str, Any]]

_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"
_AZURE_SCOPE = "https://storage.azure.com/.default"


def _aws() -> tuple[Provider, dict[str, Any]] | None:
    session = importlib.import_module("botocore.session").Session()
    credentials = session.get_credentials()
    if credentials is None:
        return None

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # renews by itself what is about to expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    region = session.get_config_variable("region")
    return provide, {"region": region} if region else {}


def _google() -> tuple[Provider, dict[str, Any]] | None:
    auth = importlib.import_module("google.auth")
    try:
        credentials, _ = auth.default(scopes=[_GOOGLE_SCOPE])
    except auth.exceptions.DefaultCredentialsError:
        return None
    request = importlib.import_module("google.auth.transport.requests").Request()

    def provide() -> dict[str, Any]:
        if not credentials.valid:
            credentials.refresh(request)
        expiry = credentials.expiry  # in UTC, without saying so
        return {"token": credentials.token, "expires_at": expiry and expiry.replace(tzinfo=timezone.utc)}

    return provide, {}


def _azure() -> tuple[Provider, dict[str, Any]] | None:
    credential = importlib.import_module("azure.identity").DefaultAzureCredential()

    def provide() -> dict[str, Any]:
        token = credential.get_token(_AZURE_SCOPE)
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, timezone.utc)}

    return provide, {}


# Each returns a provider and what else the chain knows of the store; None where it finds no credentials.
CHAINS: dict[str, Callable[[], tuple[Provider, dict[str, Any]] | None]] = {
    "aws": _aws,
    "google": _google,
    "azure": _azure,
}
