"""Which sources lie in a cache, and when each was last used.

A diskcache database, written once per process and source. It is not on the path of files: under 64 processes its LRU
mode took 2.3 s for a read at worst, and the files are their own index. It may be lost: what it does not know counts as
used when its folder was last changed.

SQLite does not survive a fork in the middle of its work: when a thread of the training process was inside it (MLflow's
store is one too), a forked loader worker finds a lock of SQLite's that nobody will ever release. There it is asked from
a thread that can be left behind.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from airdata.cache.names import DIGEST
from airdata.cache.root import Layout

__all__ = ["Catalogue", "Record"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FRESH_SECONDS = 60.0
_TIMEOUT = 5.0
_CHILD_SECONDS = 6.0  # a little more than the database itself waits for others


@dataclass(frozen=True)
class Record:
    """What is known of one source.

    Attributes:
        generation: the name of its folder.
        source: its URL without credentials; "" when not known.
        last_used: seconds since the epoch.
    """

    generation: str
    source: str
    last_used: float


class Catalogue:
    """The sources of one cache. Opened for each call: a database handle would not survive a fork."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def note(self, generation: str, source: str) -> None:
        """A process begins to use a source."""
        now = time.time()

        def put(database: Any) -> None:
            known = _parse(generation, database.get(generation))
            if known is None or now - known.last_used > _FRESH_SECONDS:
                database.set(generation, json.dumps({"source": source, "last_used": now}))

        self._ask(put, None)

    def is_due(self, generation: str, seconds: float) -> bool:
        """Whether a source's entries were not looked at for so long; if so, they count as looked at now."""
        return self._ask(
            lambda database: bool(database.add(f"looked at {generation}", value=True, expire=seconds)), otherwise=False
        )

    def forget(self, generation: str) -> None:
        """A source's files are gone."""
        self._ask(lambda database: database.delete(generation), None)

    def records(self) -> list[Record]:
        """Every source with a folder in the cache, the one unused longest first."""
        try:
            with os.scandir(self._layout.files) as found:
                changed = {e.name: e.stat(follow_symlinks=False).st_mtime for e in found if DIGEST.fullmatch(e.name)}
        except OSError:
            return []
        known: dict[str, Record | None] = {}
        if changed and os.path.isdir(self._layout.catalogue):
            known = self._ask(lambda database: {name: _parse(name, database.get(name)) for name in changed}, known)
        records = [known.get(name) or Record(name, "", when) for name, when in changed.items()]
        return sorted(records, key=lambda record: (record.last_used, record.generation))

    def _ask(self, question: Callable[[Any], T], otherwise: T) -> T:
        """The answer of the database, or ``otherwise`` where it cannot be had."""
        if not _forked:
            return self._answer(question, otherwise)
        if _lost.is_set():
            return otherwise
        answers: list[T] = []
        thread = threading.Thread(target=lambda: answers.append(self._answer(question, otherwise)), daemon=True)
        thread.start()
        thread.join(_CHILD_SECONDS)
        if not answers:
            _lost.set()
            _log.info(
                "the catalogue %s gives no answer in a forked process and is done without", self._layout.catalogue
            )
        return answers[0] if answers else otherwise

    def _answer(self, question: Callable[[Any], T], otherwise: T) -> T:
        try:
            diskcache = importlib.import_module("diskcache")
            with diskcache.Cache(self._layout.catalogue, timeout=_TIMEOUT, eviction_policy="none") as database:
                return question(database)
        except Exception as error:  # noqa: BLE001 - sqlite3 has a dozen ways to say that a file is unusable
            # A damaged or locked catalogue costs a better choice of what to remove, and no more.
            _log.info("the catalogue %s is not usable: %s", self._layout.catalogue, error)
            return otherwise


def _parse(generation: str, value: Any) -> Record | None:
    try:
        fields = json.loads(value)
        return Record(generation, str(fields["source"]), float(fields["last_used"]))
    except (TypeError, ValueError, KeyError):
        return None


def _note_fork() -> None:
    global _forked, _lost
    _forked, _lost = True, threading.Event()


_forked = False
_lost = threading.Event()  # set once the catalogue has been given up in this process
os.register_at_fork(after_in_child=_note_fork)
