"""Waiting until the files that somebody has written can be seen.

    list ──► enough? ──► manifests
      ▲       no │ say how many there are
      └─ pause ◄─┘ and give up when none has come for a while

A mount, or another machine's upload, can lag behind: a dataset that starts too early would train on what is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from airdata.errors import EmptyListingError, MissingFilesError
from airdata.manifest import Manifest

__all__ = ["wait_for_files"]

_log = logging.getLogger(__name__)

# Seconds without a new file after which the rest is not waited for.
PATIENCE = 300.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


def wait_for_files(listings: Sequence[Callable[[], Manifest]], expected: int, what: str) -> tuple[Manifest, ...]:
    """List volumes until they hold so many files together.

    Args:
        listings: each lists a volume.
        expected: files, at least; 0 to list once.
        what: the volumes, for messages.

    Raises:
        MissingFilesError: too few, and no new one for :data:`PATIENCE` seconds.
        EmptyListingError: a volume has none, and nothing was expected.
    """
    most, pause = -1, _FIRST_PAUSE
    came = started = time.monotonic()
    while True:
        manifests = [_list(listing, may_be_empty=expected > 0) for listing in listings]
        complete = tuple(manifest for manifest in manifests if manifest is not None)
        found = sum(map(len, complete))
        if found >= expected and len(complete) == len(listings):
            return complete
        now = time.monotonic()
        if found > most:
            most, came, pause = found, now, _FIRST_PAUSE
        if now - came > PATIENCE:
            raise MissingFilesError(
                f"{what}: {found} files are visible, expected_files={expected}, and no new one has come for "
                f"{now - came:.0f} s. Is whoever writes them still running? Are path and pattern right? "
                f"Without expected_files= those that are there are read."
            )
        _log.info("%s: %d of %d files are visible after %.0f s", what, found, expected, now - started)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _list(listing: Callable[[], Manifest], *, may_be_empty: bool) -> Manifest | None:
    try:
        return listing()
    except EmptyListingError:
        if not may_be_empty:
            raise
        return None
