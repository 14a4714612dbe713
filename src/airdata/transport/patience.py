"""Waiting for a mount, but not for ever.

A read of a mount whose server has gone away blocks in the kernel, where no time-out of ours reaches it. So it runs in a
thread that can be left behind: it ends when the mount answers, or with the process.

    deadline ──► between acts   no act begins any more: TransferError, and nothing changes later
             └─► within one     the kernel may carry it out whenever the mount wakes up: OutcomeUnknownError
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from airdata.errors import OutcomeUnknownError, TransferError

__all__ = ["Abandoned", "Wanted", "within"]

T = TypeVar("T")

_LOOK_SECONDS = 0.5


class Abandoned(Exception):  # noqa: N818 - nobody catches it: it ends a thread
    """Nobody waits for this work any more."""


class Wanted:
    """Whether somebody still waits for a piece of work; to be asked before it changes anything."""

    def __init__(self) -> None:
        self._given_up = False
        self._acting = threading.Lock()

    def check(self) -> None:
        """Raise Abandoned when nobody waits any more."""
        if self._given_up:
            raise Abandoned

    def commit(self, act: Callable[[], T]) -> T:
        """Do what cannot be undone, unless nobody waits any more.

        Raises:
            Abandoned: nobody waits; nothing was done.
            Exception: whatever ``act`` raises.
        """
        with self._acting:
            self.check()
            return act()

    def give_up(self) -> bool:
        """Let no act begin any more.

        Returns:
            Whether none is under way either; one that is may yet be carried out.
        """
        settled = self._acting.acquire(timeout=_LOOK_SECONDS)
        self._given_up = True  # without the lock too: a long act asks between its steps
        if settled:
            self._acting.release()
        return settled


def within(seconds: float, what: str, verb: Callable[[Wanted], T], progress: Callable[[], int]) -> T:
    """Run ``verb`` until it returns, or nothing moves for so many seconds.

    Args:
        seconds: without progress after which it is left behind.
        what: the verb and path, for messages.
        verb: the operation; commits what it changes through its argument.
        progress: how far the operation is; must not ask the mount, which may not answer.

    Raises:
        TransferError: nothing has moved for so long, and the verb commits nothing any more.
        OutcomeUnknownError: nothing has moved for so long, within what the verb commits; it may be carried out later.
        Exception: whatever ``verb`` raises.
    """
    wanted = Wanted()
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((verb(wanted), None))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            outcome.put((None, error))

    threading.Thread(target=run, name="airdata-mount", daemon=True).start()
    done, since = progress(), time.monotonic()
    while True:
        try:
            answer, error = outcome.get(timeout=min(_LOOK_SECONDS, seconds))
        except queue.Empty:
            now = progress()
            if now != done:
                done, since = now, time.monotonic()
            elif time.monotonic() - since >= seconds:
                message = f"{what}: nothing has moved for {seconds:g} s; is the server behind the mount there?"
                if wanted.give_up():
                    raise TransferError(errno.ETIMEDOUT, message) from None
                raise OutcomeUnknownError(errno.ETIMEDOUT, f"{message} This may yet be carried out") from None
            continue
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]
