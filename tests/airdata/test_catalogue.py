"""The catalogue of a cache, where SQLite itself is the trouble."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading

import pytest

from airdata.cache.catalogue import Catalogue
from airdata.cache.root import Layout


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_process_forked_while_a_thread_was_inside_sqlite_is_not_held_up(tmp_path) -> None:
    # As MLflow's store does in a training process; without a way out, some of the children never end.
    over = threading.Event()

    def busy(number: int) -> None:
        while not over.is_set():
            with sqlite3.connect(tmp_path / f"{number}.db") as database:
                database.execute("create table if not exists t (x)")
            database.close()

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    catalogue = Catalogue(Layout(str(tmp_path / "cache")))
    catalogue.note("0" * 32, "before")
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=catalogue.note, args=(f"{number:032x}", "s3://b")) for number in range(40)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * len(children)
    finally:
        over.set()
        for child in children:
            child.kill()
        for thread in threads:
            thread.join()
