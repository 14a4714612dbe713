"""Which failures are worth another try, and when to stop trying.

Waits grow exponentially with full jitter (a random time between zero and the limit), so that many processes that failed
together do not return together; see "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from airdata.errors import TransferError

__all__ = ["DEFAULT_RETRY", "Retry", "is_transient"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_TRANSIENT_ERRNO = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN EBUSY ECONNABORTED ECONNREFUSED ECONNRESET EHOSTUNREACH EINTR EIO "
        "ENETRESET ENETUNREACH EPIPE ESTALE ETIMEDOUT"
    ).split()
    if hasattr(errno, name)
)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Class names, because the clients that define them must not be imported here.
_TRANSIENT_NAMES = frozenset(
    "ClientConnectionError ClientConnectorError ClientOSError ClientPayloadError ConnectTimeout ConnectTimeoutError "
    "ConnectionClosedError EndpointConnectionError FSTimeoutError HTTPClientError IncompleteRead IncompleteReadError "
    "ProtocolError ReadTimeout ReadTimeoutError ResponseStreamingError ServerDisconnectedError "
    "ServerTimeoutError".split()
)


@dataclass(frozen=True)
class Retry:
    """How long to keep trying.

    Attributes:
        deadline: seconds without success after which the last error is final.
        first_wait: upper limit of the first pause, in seconds; doubled each time.
        longest_wait: upper limit of any pause, in seconds.
    """

    deadline: float = 120.0
    first_wait: float = 0.1
    longest_wait: float = 10.0

    def call(self, what: str, verb: Callable[[], T]) -> T:
        """Run ``verb`` until it returns, fails for good, or the deadline passes.

        Args:
            what: the verb and path, for messages.
            verb: the operation; must be safe to repeat.

        Raises:
            FileNotFoundError: there is no such file, bucket or folder.
            TransferError: any other failure, with the number of attempts and the cause.
        """
        start, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return verb()
            except TransferError:
                raise
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, f"{what}: {describe(error)}") from error
            except Exception as error:
                elapsed = time.monotonic() - start
                if not is_transient(error) or elapsed >= self.deadline:
                    tries = f"after {attempt} attempts in {elapsed:.0f} s: " if attempt > 1 else ""
                    raise TransferError(
                        getattr(error, "errno", None) or errno.EIO, f"{what}: {tries}{describe(error)}"
                    ) from error
                wait = random.uniform(0, min(self.longest_wait, self.first_wait * 2 ** (attempt - 1)))  # noqa: S311
                wait = min(wait, max(0.0, self.deadline - elapsed))
                _log.info("%s: attempt %d failed (%s); again in %.2f s", what, attempt, describe(error), wait)
                time.sleep(wait)


DEFAULT_RETRY = Retry()


def is_transient(error: BaseException) -> bool:
    """Whether the same call may well succeed a moment later."""
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return False
    if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
        return True
    if any(cls.__name__ in _TRANSIENT_NAMES for cls in type(error).__mro__):
        return True
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def _status(error: BaseException) -> int | None:
    """The HTTP status an error of botocore, aiohttp, requests or azure carries, on itself or on its cause."""
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            response = getattr(response, "status_code", None)
        for value in (response, getattr(link, "status", None), getattr(link, "status_code", None)):
            if isinstance(value, int):
                return value
    return None


def describe(error: BaseException) -> str:
    """Type and message of an error, on one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")
