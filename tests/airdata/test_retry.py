"""Which failures are tried again, and that trying ends."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

from airdata.errors import SourceChangedError, TransferError
from airdata.transport.retry import Retry, is_transient

QUICK = Retry(deadline=0.2, first_wait=0.001, longest_wait=0.01)


class Flaky:
    """Fails with the given errors in turn, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


class StatusError(Exception):
    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status = status


TRANSIENT = [
    ConnectionResetError("reset"),
    TimeoutError("slow"),
    asyncio.TimeoutError(),
    OSError(errno.EIO, "io"),
    OSError(errno.ESTALE, "stale NFS handle"),
    StatusError(503),
    StatusError(429),
    type("ServerDisconnectedError", (Exception,), {})("gone"),
]
PERMANENT = [
    PermissionError(errno.EACCES, "no"),
    IsADirectoryError(errno.EISDIR, "dir"),
    OSError(errno.ENOSPC, "full"),
    StatusError(403),
    StatusError(412),
    ValueError("bad argument"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_transient_failures_are_tried_again(error):
    verb = Flaky(error, error)
    assert QUICK.call("reading x", verb) == "answer"
    assert verb.calls == 3


@pytest.mark.parametrize("error", PERMANENT, ids=repr)
def test_permanent_failures_are_final_at_once(error):
    verb = Flaky(error, error)
    with pytest.raises(TransferError, match="reading x") as caught:
        QUICK.call("reading x", verb)
    assert verb.calls == 1
    assert caught.value.__cause__ is error


def test_a_changed_source_passes_unchanged():
    error = SourceChangedError("changed")
    with pytest.raises(SourceChangedError) as caught:
        QUICK.call("reading x", Flaky(error))
    assert caught.value is error


def test_what_is_missing_stays_file_not_found_and_is_named():
    verb = Flaky(FileNotFoundError("NoSuchKey"))
    with pytest.raises(FileNotFoundError, match=r"reading s3://b/x: .*NoSuchKey"):
        QUICK.call("reading s3://b/x", verb)
    assert verb.calls == 1


def test_trying_ends_at_the_deadline_and_says_how_often():
    def always():
        raise ConnectionResetError("reset by peer")

    start = time.monotonic()
    with pytest.raises(TransferError, match=r"attempts .*reset by peer"):
        QUICK.call("reading x", always)
    assert time.monotonic() - start < 5


def test_the_errno_survives_for_callers_that_look():
    with pytest.raises(TransferError) as caught:
        QUICK.call("writing x", Flaky(OSError(errno.ENOSPC, "full")))
    assert caught.value.errno == errno.ENOSPC


def test_an_http_status_is_found_where_clients_keep_it():
    class Response:
        status_code = 503

    for carrier in ({"ResponseMetadata": {"HTTPStatusCode": 503}}, Response()):
        error = Exception("boto or requests")
        error.response = carrier
        assert is_transient(error)
