"""Which sources lie in a cache, and when each was last used.

A diskcache database, written once per process and source. It is not on the path of files: under 64 processes its LRU
mode took 2.3 s for a read at worst, and the files are their own index. It may be lost: what it does not know counts as
used when its folder was last changed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from airdata.cache.names import DIGEST
from airdata.cache.root import Layout

__all__ = ["Catalogue", "Record"]

_log = logging.getLogger(__name__)

_FRESH_SECONDS = 60.0
_TIMEOUT = 5.0


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
        with self._tolerant(), self._open() as database:
            known = _parse(generation, database.get(generation))
            if known is None or now - known.last_used > _FRESH_SECONDS:
                database.set(generation, json.dumps({"source": source, "last_used": now}))

    def is_due(self, generation: str, seconds: float) -> bool:
        """Whether a source's entries were not looked at for so long; if so, they count as looked at now."""
        with self._tolerant(), self._open() as database:
            return bool(database.add(f"looked at {generation}", value=True, expire=seconds))
        return False

    def forget(self, generation: str) -> None:
        """A source's files are gone."""
        with self._tolerant(), self._open() as database:
            database.delete(generation)

    def records(self) -> list[Record]:
        """Every source with a folder in the cache, the one unused longest first."""
        try:
            with os.scandir(self._layout.files) as found:
                changed = {e.name: e.stat(follow_symlinks=False).st_mtime for e in found if DIGEST.fullmatch(e.name)}
        except OSError:
            return []
        known: dict[str, Record | None] = {}
        if changed and os.path.isdir(self._layout.catalogue):
            with self._tolerant(), self._open() as database:
                known = {name: _parse(name, database.get(name)) for name in changed}
        records = [known.get(name) or Record(name, "", when) for name, when in changed.items()]
        return sorted(records, key=lambda record: (record.last_used, record.generation))

    def _open(self) -> Any:
        diskcache = importlib.import_module("diskcache")
        return diskcache.Cache(self._layout.catalogue, timeout=_TIMEOUT, eviction_policy="none")

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - sqlite3 has a dozen ways to say that a file is unusable
            # A damaged or locked catalogue costs a better choice of what to remove, and no more.
            _log.info("the catalogue %s is not usable: %s", self._layout.catalogue, error)


def _parse(generation: str, value: Any) -> Record | None:
    try:
        fields = json.loads(value)
        return Record(generation, str(fields["source"]), float(fields["last_used"]))
    except (TypeError, ValueError, KeyError):
        return None
