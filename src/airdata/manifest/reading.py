"""From what a volume holds to a manifest: list, select, count what is left out, ask again while there is nothing.

transport, or obstore in a child ──► progress ──► selection ──► Manifest.from_files
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from airdata.errors import EmptyListingError
from airdata.lister import ListerError, list_apart, order_for
from airdata.manifest import Manifest
from airdata.manifest.patterns import Selection, is_hidden
from airdata.transport import FileInfo, Transport
from airdata.volume import Volume, safe_url

__all__ = ["read_listing"]

_log = logging.getLogger(__name__)

# A mount can lag behind a write by a few seconds.
EMPTY_WAIT = 5.0
_EMPTY_PAUSE = 0.25
PROGRESS_SECONDS = 5.0


def read_listing(transport: Transport, selection: Selection, wait: float | None = None) -> Manifest:
    """List a volume now; an empty answer is asked again until ``wait`` seconds have passed.

    Raises:
        EmptyListingError: no file was found; names the volume and the pattern.
    """
    deadline = time.monotonic() + (EMPTY_WAIT if wait is None else wait)
    while True:
        start = time.monotonic()
        manifest, left_out = _list_once(transport, selection)
        if len(manifest):
            _log.info(
                "%s: %d files in %.1f s (%d hidden files and markers left out)",
                transport.volume,
                len(manifest),
                time.monotonic() - start,
                left_out.hidden,
            )
            return manifest
        if time.monotonic() >= deadline:
            raise EmptyListingError(_describe_nothing(transport.volume, selection, left_out))
        time.sleep(_EMPTY_PAUSE)


@dataclass
class _LeftOut:
    """How many of the files seen are not in the manifest, and why."""

    hidden: int = 0
    other_names: int = 0


def _list_once(transport: Transport, selection: Selection) -> tuple[Manifest, _LeftOut]:
    """List with obstore in a process of its own if that can be done, and otherwise as the transport does it."""
    order = order_for(transport, selection.prefixes)
    if order is not None:
        try:
            # Closed here, and not when the traceback of an interrupt is: a notebook keeps that, and with it the child.
            with contextlib.closing(list_apart(order)) as found:
                return _select(transport.volume, found, selection)
        except ListerError as error:
            _log.info("%s: obstore could not list it, so fsspec does: %s", transport.volume, error)
    files = (file for prefix in selection.prefixes for file in transport.list(prefix))
    return _select(transport.volume, files, selection)


def _select(volume: Volume, files: Iterable[FileInfo], selection: Selection) -> tuple[Manifest, _LeftOut]:
    keeps, take_hidden, left_out = selection.keeps(), selection.names_hidden, _LeftOut()

    def wanted() -> Iterator[FileInfo]:
        for file in _with_progress(volume, files):
            if not keeps(file.path):
                left_out.other_names += 1
            elif not take_hidden and is_hidden(file.path):
                left_out.hidden += 1
            else:
                yield file

    return Manifest.from_files(wanted(), safe_url(volume.url)), left_out


def _with_progress(volume: Volume, files: Iterable[FileInfo]) -> Iterator[FileInfo]:
    """The same files, and a line in the log every few seconds, also when a driver says nothing until it is done."""
    start, seen, over = time.monotonic(), 0, threading.Event()

    def tell() -> None:
        while not over.wait(PROGRESS_SECONDS):
            _log.info("%s: %d files listed in %.0f s", volume, seen, time.monotonic() - start)

    threading.Thread(target=tell, name="airdata-listing", daemon=True).start()
    try:
        for file in files:
            seen += 1
            yield file
    finally:
        over.set()


def _describe_nothing(volume: Volume, selection: Selection, left_out: _LeftOut) -> str:
    place = volume.name if volume.name == safe_url(volume.url) else f"{volume.name} ({safe_url(volume.url)})"
    text = f"{place}: no file matches ({selection})."
    if left_out.hidden or left_out.other_names:
        text += f" {left_out.other_names} files have other names and {left_out.hidden} are hidden or markers."
        if any("/" not in glob for glob in selection.globs):
            text += " '*' stays inside a folder: '**/*' also looks into folders inside it."
    else:
        text += (
            " There are no files at all. Is the path right? A mount can lag behind a write: wait until the files are "
            "visible, or pass manifest=, which needs no listing."
        )
    return text
