"""What a failed request means, read off the exception of whichever client made it.

    exception of botocore, aiohttp, azure, gcsfs, obstore, the kernel ──► Failure ──► what Retry does
                                                                  ├─► seconds the server asks to wait
                                                                  └─► one line for a message, without secrets

Clients are known here by the names of their classes, since importing them to ask costs seconds.
"""

from __future__ import annotations

import asyncio
import email.utils
import enum
import errno
import re
import time
from collections.abc import Iterator
from typing import Any

from airdata.errors import SourceChangedError

__all__ = ["Failure", "classify", "describe", "is_throttled", "retry_after"]


class Failure(enum.Enum):
    """What to do about a failed request."""

    TRANSIENT = "the same request may well succeed a moment later"
    AUTH = "the credentials were refused, and others may be had by now"
    CHANGED = "the source is no longer the version that was asked for"
    PERMANENT = "trying again would change nothing"


_TRANSIENT_ERRNO = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN EBUSY ECONNABORTED ECONNREFUSED ECONNRESET EHOSTUNREACH EINTR EIO "
        "ENETRESET ENETUNREACH ENOTCONN EPIPE ESTALE ETIMEDOUT"
    ).split()
    if hasattr(errno, name)
)
_PRECONDITION_FAILED = 412
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_THROTTLED_STATUS = frozenset({429, 503})
# What stores say in the body of an answer, whatever its status: S3 sends RequestTimeout with a 400.
_TRANSIENT_CODES = frozenset(
    "InternalError OperationAborted OperationTimedOut RequestLimitExceeded RequestTimeout ServerBusy "
    "ServiceUnavailable SlowDown Throttling ThrottlingException".split()
)
_AUTH_CODES = frozenset(
    "AuthenticationFailed ExpiredToken ExpiredTokenException InvalidAccessKeyId InvalidAuthenticationInfo InvalidToken "
    "RequestExpired TokenRefreshRequired".split()
)
_TRANSIENT_NAMES = frozenset(
    "ClientConnectionError ClientConnectorError ClientOSError ClientPayloadError ConnectTimeout ConnectTimeoutError "
    "ConnectionClosedError EndpointConnectionError FSTimeoutError HTTPClientError IncompleteRead IncompleteReadError "
    "ProtocolError ReadTimeout ReadTimeoutError ResponseStreamingError ServerDisconnectedError ServerTimeoutError "
    "ServiceRequestError ServiceResponseError".split()
)
_AUTH_NAMES = frozenset(
    "CredentialRetrievalError CredentialUnavailableError NoCredentialsError RefreshError TokenRetrievalError "
    "UnauthenticatedError UnauthorizedSSOTokenError".split()
)
# obstore has one class for most failures, and tells status and code in its text alone.
_OBSTORE_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_DEBUG_DUMP = "\n\nDebug source:"
_USERINFO = re.compile(r"(\w+://)[^\s/@]*:[^\s/@]*@")
_QUERY = re.compile(r"(\w+://[^\s?'\")]+)\?[^\s'\")]+")


def classify(error: BaseException) -> Failure:
    """What a failure means for the request that met it."""
    status, code = _status(error), _code(error)
    names = {cls.__name__ for link in _links(error) for cls in type(link).__mro__}
    if isinstance(error, SourceChangedError) or status == _PRECONDITION_FAILED or code == "PreconditionFailed":
        return Failure.CHANGED
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return Failure.PERMANENT
    # The names come before the status: aiohttp gives a body that ends early one of 400.
    if names & _TRANSIENT_NAMES or isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
        return Failure.TRANSIENT
    if code in _AUTH_CODES or names & _AUTH_NAMES or _lacks_credentials(status, code):
        return Failure.AUTH
    if isinstance(error, PermissionError):
        return Failure.PERMANENT
    if status is not None:
        transient = status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    else:
        # Without a status, obstore's general error is a connection that broke, a time-out or a body cut short.
        transient = "GenericError" in names or (isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO)
    return Failure.TRANSIENT if transient else Failure.PERMANENT


def is_throttled(error: BaseException) -> bool:
    """Whether the store asked for fewer requests."""
    return _status(error) in _THROTTLED_STATUS or _code(error) == "SlowDown"


def retry_after(error: BaseException) -> float | None:
    """Seconds that the server asks to wait (RFC 9110, section 10.2.3), or None where it does not."""
    for link in _links(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
        else:
            headers = getattr(response, "headers", None) or getattr(link, "headers", None)
        for name in ("Retry-After", "retry-after"):  # some clients' headers know upper from lower case
            value = headers.get(name) if hasattr(headers, "get") else None
            if value:
                return _seconds(str(value))
    return None


def describe(error: BaseException) -> str:
    """Type and message of an error, on one line, without what may be a password or a signature."""
    text = str(error).split(_DEBUG_DUMP, 1)[0]
    text = _QUERY.sub(r"\1?***", _USERINFO.sub(r"\1***@", text))
    return f"{type(error).__name__}: {text}".replace("\n", " ")


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: s3fs and adlfs raise a built-in class from the client's own."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        yield link
        seen.append(link)
        link = link.__cause__


def _lacks_credentials(status: int | None, code: str | None) -> bool:
    if status == 401:  # noqa: PLR2004 - the HTTP status
        return True
    # The answer to a HEAD has no body, so that an expired token shows as a bare 400 (S3) or 403.
    return status in {400, 403} and code in {None, "400", "403", "Forbidden", "Bad Request"}


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error or its cause carries."""
    for link in _links(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            response = getattr(response, "status_code", None)
        for value in (response, getattr(link, "status", None), getattr(link, "status_code", None), _plain_code(link)):
            if isinstance(value, int):
                return value
        if _is_obstore(link) and (found := _OBSTORE_STATUS.search(str(link))):
            return int(found[1])
    return None


def _plain_code(error: BaseException) -> Any:
    """The ``code`` of gcsfs's errors; aiohttp's is deprecated, and warns."""
    return vars(error).get("code")


def _code(error: BaseException) -> str | None:
    """The store's own word for what went wrong."""
    for link in _links(error):
        response = getattr(link, "response", None)
        value: Any = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        value = value or getattr(link, "error_code", None)
        if value:
            return str(getattr(value, "value", value))
        if _is_obstore(link) and (found := _CODE.search(str(link))):
            return found[1]
    return None


def _is_obstore(error: BaseException) -> bool:
    return type(error).__module__.startswith("obstore")


def _seconds(value: str) -> float | None:
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
