"""Which failures are tried again, what is done between two tries, and that trying ends."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import threading
import time

import pytest

from airdata.errors import SourceChangedError, TransferError
from airdata.transport.clients import Clients
from airdata.transport.failures import Failure, classify, describe, retry_after
from airdata.transport.retry import Deed, Retry
from airdata.volume import Volume

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
    """As aiohttp's, or azure's with a code."""

    def __init__(self, status, code=None, headers=None):
        super().__init__(f"HTTP {status}")
        self.status = status
        self.error_code = code
        self.headers = headers or {}


class BotoError(Exception):
    """As botocore's: everything is in a dictionary."""

    def __init__(self, status, code, headers=None):
        super().__init__(f"HTTP {status} {code}")
        facts = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
        self.response = {"ResponseMetadata": facts, "Error": {"Code": code}}


def translated(cls, cause):
    """As s3fs raises: a built-in class, from the client's own."""
    error = cls("translated")
    error.__cause__ = cause
    return error


TRANSIENT = [
    ConnectionResetError("reset"),
    TimeoutError("slow"),
    asyncio.TimeoutError(),
    OSError(errno.EIO, "io"),
    OSError(errno.ESTALE, "stale NFS handle"),
    StatusError(503),
    StatusError(429),
    type("ServerDisconnectedError", (Exception,), {})("gone"),
    BotoError(400, "RequestTimeout"),
    BotoError(503, "SlowDown"),
    translated(OSError, BotoError(500, "InternalError")),
]
PERMANENT = [
    PermissionError(errno.EACCES, "no"),
    IsADirectoryError(errno.EISDIR, "dir"),
    OSError(errno.ENOSPC, "full"),
    StatusError(403, "AuthorizationPermissionMismatch"),
    translated(PermissionError, BotoError(403, "AccessDenied")),
    BotoError(400, "InvalidArgument"),
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


REFUSED = [
    StatusError(401),
    StatusError(403, "AuthenticationFailed"),
    BotoError(400, "ExpiredToken"),
    BotoError(400, "400"),  # the answer to a HEAD has no body to tell more
    translated(PermissionError, BotoError(403, "InvalidAccessKeyId")),
    type("RefreshError", (Exception,), {})("the refresh token has expired"),
]


@pytest.mark.parametrize("error", REFUSED, ids=repr)
def test_refused_credentials_are_renewed_once_and_then_final(error):
    renewals = []
    verb = Flaky(error)
    assert QUICK.call("reading x", verb, renew=lambda: renewals.append(1) or True) == "answer"
    assert (verb.calls, renewals) == (2, [1])
    with pytest.raises(TransferError, match="credentials were refused"):
        QUICK.call("reading x", Flaky(error, error), renew=lambda: renewals.append(1) or True)
    assert renewals == [1, 1]


def test_a_transient_failure_after_a_renewal_is_tried_again_and_a_second_refusal_is_final():
    verb = Flaky(StatusError(401), ConnectionResetError("reset"), TimeoutError("slow"))
    assert QUICK.call("reading x", verb, renew=lambda: True) == "answer"
    assert verb.calls == 4
    verb = Flaky(StatusError(401), ConnectionResetError("reset"), StatusError(401))
    with pytest.raises(TransferError, match="credentials were refused"):
        QUICK.call("reading x", verb, renew=lambda: True)
    assert verb.calls == 3


@pytest.mark.parametrize("progress", [None, lambda: 0], ids=["unknown", "none seen"])
def test_the_deadline_counts_from_the_first_failure(progress):
    done = []

    def takes_longer_than_the_deadline_and_fails_once():
        done.append(1)
        if len(done) == 1:
            time.sleep(0.6)
            raise ConnectionResetError("reset")
        return "answer"

    retry = Retry(deadline=0.5, first_wait=0.001)
    assert retry.call("writing x", takes_longer_than_the_deadline_and_fails_once, progress=progress) == "answer"


@pytest.mark.parametrize("error", REFUSED, ids=repr)
def test_refused_credentials_that_cannot_be_renewed_are_final_at_once(error):
    for renew in (None, lambda: False):
        verb = Flaky(error, error)
        with pytest.raises(TransferError, match="credentials were refused"):
            QUICK.call("reading x", verb, renew=renew)
        assert verb.calls == 1


def test_a_precondition_that_fails_is_a_changed_source():
    with pytest.raises(SourceChangedError, match="reading x: it was replaced"):
        QUICK.call("reading x", Flaky(StatusError(412)))


def test_progress_starts_the_deadline_anew_and_standing_still_does_not():
    done = 0

    def one_more_each_time():
        nonlocal done
        done += 1
        time.sleep(0.05)
        if done < 10:
            raise ConnectionResetError("reset")
        return "answer"

    assert (
        Retry(deadline=0.2, first_wait=0.001).call("reading x", one_more_each_time, progress=lambda: done) == "answer"
    )
    done = 0
    with pytest.raises(TransferError):
        Retry(deadline=0.2, first_wait=0.001).call("reading x", one_more_each_time, progress=lambda: 7)


def test_a_server_that_says_when_to_return_is_obeyed():
    start = time.monotonic()
    verb = Flaky(StatusError(503, headers={"Retry-After": "1"}))
    assert Retry(deadline=30, first_wait=0.001).call("reading x", verb) == "answer"
    assert time.monotonic() - start >= 1


def test_a_server_that_says_to_return_after_the_deadline_is_not_asked_again():
    verb = Flaky(*[BotoError(429, "429", {"retry-after": "3600"})] * 2)
    with pytest.raises(TransferError):
        Retry(deadline=30).call("reading x", verb)
    assert verb.calls == 1


def test_the_wait_may_be_a_number_or_a_date():
    assert retry_after(StatusError(503, headers={"Retry-After": "7"})) == 7
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < retry_after(BotoError(503, "SlowDown", {"retry-after": later})) <= 100
    assert retry_after(translated(OSError, BotoError(503, "SlowDown", {"retry-after": "5"}))) == 5
    assert retry_after(StatusError(503, headers={"Retry-After": "soon"})) is None
    assert retry_after(ConnectionResetError()) is None


def test_repetitions_are_counted():
    again = []
    QUICK.call("reading x", Flaky(ConnectionResetError(), TimeoutError()), again=lambda: again.append(1))
    assert len(again) == 2


def test_an_http_status_is_found_where_clients_keep_it():
    class Response:
        status_code = 503

    error = Exception("requests")
    error.response = Response()
    assert classify(error) is Failure.TRANSIENT
    assert classify(BotoError(503, None)) is Failure.TRANSIENT


def test_no_message_shows_a_password_or_a_signature():
    error = ValueError("GET https://me:hidden@host/c/a.bin?sv=1&sig=hidden failed\nfor 'abfs://c@account/a'")
    assert describe(error) == "ValueError: GET https://***@host/c/a.bin?*** failed for 'abfs://c@account/a'"


def test_however_many_threads_find_a_client_stale_one_opens_it_anew():
    clients, opened = Clients(), []

    def opener():
        opened.append(object())
        return opened[-1]

    stale = clients.get(opener)
    assert not clients.renew(stale, opener), "a client that was never accepted has wrong credentials, not old ones"
    clients.proved(stale)
    barrier = threading.Barrier(8)

    worth_another_try = []

    def find_it_stale():
        barrier.wait(30)
        worth_another_try.append(clients.renew(stale, opener))

    threads = [threading.Thread(target=find_it_stale) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert worth_another_try == [True] * 8
    assert len(opened) == 2
    assert clients.get(opener) is opened[1]


@pytest.mark.parametrize("url", ["http://user:S3CRET@host/data", "https://host/data?sig=S3CRET"])
def test_no_form_of_what_is_done_shows_credentials(url, caplog):
    deed = Deed("reading", Volume.of(url), "x")
    with caplog.at_level("INFO", "airdata"), pytest.raises(TransferError) as error:
        QUICK.call(deed, Flaky(*[ConnectionResetError()] * 1000))
    kept = [record.args for record in caplog.records]
    assert kept
    assert "S3CRET" not in f"{kept} {caplog.text} {error.value} {deed} {deed!r} {deed.volume!r}"
