"""MLflow tracking URIs as text: made absolute for other processes, and without passwords for people."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["absolute_uri", "is_local", "redact", "run_page", "split_credentials"]


def absolute_uri(uri: str, directory: Path) -> str:
    """A tracking URI that means the same in every directory.

    Args:
        uri: What MLflow has; `sqlite:///mlflow.db` (three slashes), `file:mlruns` and plain paths are relative.
        directory: The directory to resolve against, absolute.
    """
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{directory / uri.removeprefix('sqlite:///')}"
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return (directory / uri.removeprefix("file:")).as_uri()
    if ":" not in uri and uri != "databricks":
        return (directory / (uri or "mlruns")).as_uri()
    return uri


def is_local(uri: str) -> bool:
    """Whether the URI is a file or directory of this machine, so that no server can fail to answer."""
    return urlsplit(uri).scheme in {"sqlite", "file"}


def redact(text: str) -> str:
    """The text with `user:password@` of each URL in it replaced."""
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


def split_credentials(uri: str) -> tuple[str, str, str]:
    """(URI without them, user, password) for http(s). A database's URI stays whole: it knows no other way."""
    parts = urlsplit(uri)
    if parts.scheme not in {"http", "https"} or "@" not in parts.netloc:
        return uri, "", ""
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return bare, unquote(parts.username or ""), unquote(parts.password or "")


def run_page(uri: str, experiment_id: str, run_id: str, workspace: str | None = None) -> str | None:
    """Address of a run's page, or None if no server shows it.

    Args:
        uri: The absolute tracking URI.
        experiment_id: The experiment's id.
        run_id: The run's id.
        workspace: Address of the Databricks workspace, for the URIs `databricks` and `databricks://<profile>`.
    """
    if urlsplit(uri).scheme in {"http", "https"}:
        return f"{split_credentials(uri)[0].rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    if uri.partition(":")[0] == "databricks" and workspace:
        return f"{workspace.rstrip('/')}/ml/experiments/{experiment_id}/runs/{run_id}"
    return None
