"""How a reader's share of an epoch becomes samples.

places of the order ──► rows of the manifest ──► prefetch ──► lease, or error ──► sample, substitute, or nothing
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tqdm.auto import tqdm

from airdata.cache import CachedFile
from airdata.errors import BadFilesError, FetchError, StalledError
from airdata.files import Entry, Files, Leases, Yields, to_sample
from airdata.metrics import Counters
from airdata.order import Positions, mix
from airdata.prefetch import Prefetcher
from airdata.state import Place, Start
from airdata.transport import FileInfo

__all__ = ["OnError", "Reader", "Reading", "fetches_at_once"]

_log = logging.getLogger(__name__)

OnError = Literal["raise", "replace", "skip"]
_SUBSTITUTES = 16
# Of files: a process can do with 50 what a store at 50 ms brings; on nodes of many processes each needs its own.
_PREFETCH_NODE, _PREFETCH_PROCESS = 64, 32
# Seconds without a byte after which a fetch is given up.
STALL_SECONDS = 300.0


@dataclass(frozen=True)
class Reading:
    """What the user asked for; see :class:`airdata.UCVolumeDataset`."""

    shuffle: bool
    seed: int
    on_error: OnError
    max_bad_files: int
    prefetch: int | None
    prefetch_bytes: int
    yields: Yields


def fetches_at_once(prefetch: int | None, sharers: int) -> int:
    """Files that one of so many processes of a node may fetch at once, given the node's limit or None."""
    return max(_PREFETCH_NODE // sharers, _PREFETCH_PROCESS) if prefetch is None else max(1, prefetch // sharers)


class Reader:
    """Reads one share of an epoch at a time.

    Attributes:
        place: where it stands.
        counters: what it has read.
    """

    def __init__(self, files: Files, reading: Reading) -> None:
        self.place = Place(0)
        self.counters = Counters()
        self._files = files
        self._reading = reading
        self._leases = Leases()
        self._bad: set[str] = set()

    def read(self, start: Start, role: int, place: Place) -> Iterator[Any]:
        """The samples of the part ``role`` of an iteration, from ``place`` on."""
        self.place = place
        self._leases.release()
        self._bad.clear()
        files, reading, epoch, passed = self._files, self._reading, place.epoch, place.passed
        order = files.order(reading.seed, epoch, shuffle=reading.shuffle, groups=start.groups)
        blocks = start.schedule(len(files), epoch).positions(start.rank, role, start.workers, passed)
        plan = (
            (position, entry)
            for block in blocks
            for position, entry in zip(block.tolist(), files.take(order(block)), strict=True)
        )
        for position, file, outcome in self._outcomes(plan, start.local_world_size * start.workers):
            passed += 1
            entry, lease = file, outcome
            if isinstance(lease, Exception):
                substitute = self._instead(file, lease, epoch, position)
                if substitute is None:
                    self.place = Place(epoch, passed)
                    continue
                entry, lease = substitute
            sample = to_sample(files, entry, lease, reading.yields)
            if reading.yields == "bytes":
                lease.release()
            elif lease.on_release is not None:  # files in place need no lease
                self._leases.keep(lease, start.keep)
            self.place = Place(epoch, passed)
            yield sample

    def warm(self, rows: Sequence[int] | Positions, sharers: int, *, progress: bool) -> Counters:
        """Bring some files into the cache, as one of so many processes of a node that do."""
        counters = Counters()
        if self._files.in_place:
            return counters
        retries = self._files.retries
        prefetcher = self._prefetcher(((row, self._files[row]) for row in map(int, rows)), sharers, counters)
        with tqdm(total=len(rows), desc="airdata: warming", unit="file", disable=not progress) as bar:
            for _, file, outcome in prefetcher:
                if isinstance(outcome, Exception):
                    raise self._error(file, outcome) from outcome
                outcome.release()
                bar.update()
        counters.retries = self._files.retries - retries
        return counters

    def check_bad_files(self, count: int) -> None:
        """Raise BadFilesError when all workers of a rank together have met more bad files than allowed."""
        if self._reading.on_error != "raise" and count > self._reading.max_bad_files:
            raise BadFilesError(
                f"{count} files could not be read, and max_bad_files={self._reading.max_bad_files}; the log names them"
            )

    def _outcomes(
        self, plan: Iterator[tuple[int, Entry]], sharers: int
    ) -> Iterator[tuple[int, Entry, CachedFile | Exception]]:
        if self._files.in_place:  # nothing to fetch, so threads would only cost time
            for position, entry in plan:
                yield position, entry, self._open_in_place(entry)
            return
        prefetcher = self._prefetcher(plan, sharers, self.counters)
        retries = self._files.retries
        try:
            for position, file, outcome in prefetcher:
                assert isinstance(file, Entry)
                if isinstance(outcome, Exception) or not outcome.hit:
                    retries = self._count_retries(retries)
                yield position, file, outcome
        finally:
            prefetcher.close()
            self._count_retries(retries)

    def _count_retries(self, before: int) -> int:
        """Count the requests that were repeated since there were ``before``; how many there are now."""
        now = self._files.retries
        self.counters.retries += now - before
        return now

    def _open_in_place(self, entry: Entry) -> CachedFile | Exception:
        try:
            lease = self._files.open(entry)
        except OSError as error:
            self.counters.bad_files += 1
            return error
        self.counters.files += 1
        self.counters.hits += 1
        return lease

    def _prefetcher(self, plan: Iterable[tuple[int, FileInfo]], sharers: int, counters: Counters) -> Prefetcher[int]:
        return Prefetcher(
            plan,
            partial(self._files.open, looked=True),
            # The budget is the node's, since it is the source and the network that would be overrun.
            max_files=fetches_at_once(self._reading.prefetch, sharers),
            max_bytes=max(1, self._reading.prefetch_bytes // sharers),
            timeout=STALL_SECONDS,
            find=self._files.find,
            counters=counters,
        )

    def _instead(self, file: Entry, error: Exception, epoch: int, position: int) -> tuple[Entry, CachedFile] | None:
        """What is yielded in place of a bad file; None to skip it."""
        if self._reading.on_error == "raise":
            raise self._error(file, error) from error
        self._note_bad(file, error)
        if self._reading.on_error == "skip":
            return None
        for attempt in range(_SUBSTITUTES):
            # Chosen by the position alone, so that a resumed run, on any topology, gets the same one.
            row = mix(self._reading.seed, epoch, position, attempt) % len(self._files)
            candidate = self._files[row]
            if candidate == file:
                continue
            try:
                return candidate, self._files.open(candidate)
            except OSError as again:
                self._note_bad(candidate, again)
        raise self._error(file, error) from error

    def _note_bad(self, file: Entry, error: Exception) -> None:
        name, allowed = self._files.name(file), self._reading.max_bad_files
        if name in self._bad:
            return
        self._bad.add(name)
        _log.warning("%s cannot be read (on_error=%r): %s", name, self._reading.on_error, error)
        if len(self._bad) > allowed:
            raise BadFilesError(
                f"{len(self._bad)} files could not be read, and max_bad_files={allowed}; the last is {name}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _error(self, file: FileInfo, error: Exception) -> Exception:
        assert isinstance(file, Entry)
        if isinstance(error, StalledError):
            return error
        return FetchError(f"{self._files.name(file)} could not be read: {type(error).__name__}: {error}", file.path)
