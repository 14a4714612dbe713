import threading

import pytest

from airdata.checkpoint.counted import CountedRetry
from airdata.errors import TransferError


def test_it_counts_the_attempts_after_the_first_of_all_threads():
    retry = CountedRetry()

    def work():
        failures = [ConnectionError("a"), ConnectionError("b")]

        def verb():
            if failures:
                raise failures.pop()
            return 7

        assert retry.call("reading", verb) == 7

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert retry.count == 8


def test_what_fails_for_good_was_tried_once():
    retry = CountedRetry()

    def refused():
        raise PermissionError("no")

    with pytest.raises(TransferError, match="no"):
        retry.call("reading", refused)
    assert retry.count == 0
