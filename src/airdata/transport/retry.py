"""The one place that tries again, and knows when to stop.

    verb fails ──► Failure.TRANSIENT   wait, again, until nothing has moved for the deadline since the first failure
                   Failure.AUTH        wait, renew the client once, again
                   Failure.CHANGED     SourceChangedError
                   Failure.PERMANENT   TransferError

Waits grow exponentially with full jitter (a random time between zero and the limit), so that many processes that failed
together do not return together; see "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. A server that says
how long to wait is obeyed.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from airdata.errors import AirdataError, SourceChangedError, TransferError
from airdata.transport.failures import Failure, classify, describe, retry_after
from airdata.volume import Volume

__all__ = ["DEFAULT_RETRY", "Deed", "Retry", "describe"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Clients whose tokens run out together must not all ask for new ones in the same instant.
_RENEWAL_SPREAD = 10
_REFUSED = (
    "the credentials were refused. Those in storage_options stay as they are; where they expire, leave them out, so "
    "that the driver finds and renews its own: "
)


class Deed(NamedTuple):
    """What is done to which path of a volume; in words only when something fails, since words take time."""

    verb: str
    volume: Volume
    path: str

    def __str__(self) -> str:
        return f"{self.verb} {self.volume.safe_join(self.path)}"

    def __repr__(self) -> str:  # that of a tuple would show all of the volume
        return str(self)


@dataclass(frozen=True)
class Retry:
    """How long to keep trying.

    Attributes:
        deadline: seconds without success or progress, from the first failure on, after which the last error is final.
        first_wait: upper limit of the first pause, in seconds; doubled each time.
        longest_wait: upper limit of any pause, in seconds, that the server did not ask for.
    """

    deadline: float = 120.0
    first_wait: float = 0.1
    longest_wait: float = 10.0

    def call(
        self,
        what: str | Deed,
        verb: Callable[[], T],
        *,
        renew: Callable[[], bool] | None = None,
        progress: Callable[[], int] | None = None,
        again: Callable[[], object] | None = None,
    ) -> T:
        """Run ``verb`` until it returns, fails for good, or nothing moves until the deadline.

        Args:
            what: the verb and path, for messages.
            verb: the operation; must be safe to repeat.
            renew: opens the client anew, with credentials read anew; False when that would change nothing.
            progress: how much of the operation is done. Getting further than ever before starts the deadline anew.
            again: called before each repetition, for those who count.

        Raises:
            FileNotFoundError: there is no such file, bucket or folder.
            SourceChangedError: the file is not the version that was asked for.
            TransferError: any other failure, with the number of attempts and the cause.
        """
        start, since = time.monotonic(), 0.0
        attempts = waits = furthest = 0
        while True:
            attempts += 1
            try:
                return verb()
            except AirdataError:
                raise
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, f"{what}: {describe(error)}") from error
            except Exception as error:
                failure, now = classify(error), time.monotonic()
                since = since or now  # not before: nobody knows that a verb which took long stood still
                if progress is not None and (done := progress()) > furthest:
                    furthest, since, waits = done, now, 0
                wait, left = self._pause(error, failure, waits), self.deadline - (now - since)
                may_help = failure is Failure.TRANSIENT or (failure is Failure.AUTH and renew is not None)
                # A wait that the server asked for is not cut short: coming back early is what it must not see.
                if not may_help or left <= 0 or (wait > left and retry_after(error) is not None):
                    raise self._final(what, error, failure, attempts, now - start) from error
                _log.info("%s: attempt %d failed (%s); again in %.2f s", str(what), attempts, describe(error), wait)
                time.sleep(min(wait, left))
                waits += 1
                if failure is Failure.AUTH:
                    assert renew is not None
                    if not renew():
                        raise self._final(what, error, failure, attempts, now - start) from error
                    renew = None  # a second refusal is final
                if again is not None:
                    again()

    def _pause(self, error: BaseException, failure: Failure, waits: int) -> float:
        spread = _RENEWAL_SPREAD * self.first_wait if failure is Failure.AUTH else self.first_wait * 2.0**waits
        pause = random.uniform(0, min(self.longest_wait, spread))  # noqa: S311
        asked = retry_after(error)
        return pause if asked is None else asked + pause

    def _final(
        self, what: str | Deed, error: BaseException, failure: Failure, attempts: int, seconds: float
    ) -> TransferError:
        tries = f"after {attempts} attempts in {seconds:.0f} s: " if attempts > 1 else ""
        if failure is Failure.CHANGED:
            return SourceChangedError(f"{what}: it was replaced since the listing; list the volume again")
        advice = _REFUSED if failure is Failure.AUTH else ""
        return TransferError(getattr(error, "errno", None) or errno.EIO, f"{what}: {tries}{advice}{describe(error)}")


DEFAULT_RETRY = Retry()
