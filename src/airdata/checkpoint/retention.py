"""How the checkpoints that no policy keeps leave a root.

Only what is valid counts, nothing newer than the step just published goes, and a checkpoint stops to exist before its
files do: ``.metadata`` first, so that no half-removed checkpoint can be taken for one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial

from airdata.checkpoint import layout
from airdata.checkpoint.policies import Candidate, Policy, expired
from airdata.checkpoint.publish import ABANDONED_AFTER, remove_files
from airdata.errors import CheckpointError
from airdata.transport import Transport, open_transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["check_valid", "prune", "published_steps"]

_log = logging.getLogger(__name__)


def published_steps(root: Volume) -> list[int]:
    """The steps that are published under a root, ascending."""
    found = []
    for name in open_transport(root).directories():
        step = layout.step_of(name)
        if step is None:
            continue
        try:
            open_transport(root.child(name)).stat(layout.METADATA)
        except FileNotFoundError:
            continue
        found.append(step)
    return sorted(found)


def check_valid(transport: Transport) -> layout.Published:
    """Read what says that a checkpoint exists, and compare the sizes of its files: two reads and a listing.

    Raises:
        CheckpointNotFoundError: nothing is published here.
        CorruptCheckpointError: something is damaged, missing or short.
    """
    published = layout.read_published(transport)
    layout.check_sizes(transport, published.files())
    return published


def _metrics(transport: Transport) -> Mapping[str, float] | None:
    """What a checkpoint scored; None when :func:`check_valid` finds something wrong, which is said in the log."""
    try:
        published = check_valid(transport)
    except CheckpointError as error:
        _log.warning("%s", error)
        return None
    return published.record.metrics if published.record is not None else {}


def prune(root: Volume, current: int, policies: Sequence[Policy], *, dry_run: bool = False) -> list[int]:
    """Remove the steps that no policy keeps, and what killed saves left of older ones.

    Args:
        root: holds the steps.
        current: the step just published; newer ones are not touched.
        policies: see :func:`airdata.checkpoint.policies.expired`; none keep everything.
        dry_run: remove nothing.

    Returns:
        The steps removed, oldest first.

    Raises:
        TransferError: storage failed.
    """
    if not policies:
        return []
    transports = {step: open_transport(root.child(layout.step_name(step))) for step in published_steps(root)}
    candidates = [Candidate(step, partial(_metrics, transport)) for step, transport in transports.items()]
    steps = expired(candidates, current, policies)
    if dry_run:
        return steps
    for step in steps:
        _remove(transports[step])
    for name in open_transport(root).directories():
        step_found = layout.step_of(name)
        if step_found is not None and step_found < current and step_found not in transports:
            _remove_abandoned(open_transport(root.child(name)))
    return steps


def _remove(transport: Transport) -> None:
    try:
        names = list(layout.read_published(transport).owned())
    except CheckpointError as error:
        _log.info("%s; it is removed by the names of its files", error)
        names = []
    transport.delete(layout.METADATA)
    ours = [file.path for file in transport.list() if layout.is_leftover(file.path)]
    remove_files(transport, sorted({*names, *ours}))
    _remove_folder(transport)


def _remove_abandoned(transport: Transport) -> None:
    try:
        names = [f.path for f in transport.list() if layout.is_abandoned(f, ABANDONED_AFTER)]
    except OSError as error:
        _log.warning("%s: leftovers were not looked for: %s", transport.volume, describe(error))
        return
    remove_files(transport, names)
    if names or _is_old(transport):
        _remove_folder(transport)


def _is_old(transport: Transport) -> bool:
    """Whether a folder, if it is one, has been as it is for so long that no save has only just made it."""
    try:
        return time.time() - os.stat(transport.volume.directory or "").st_mtime > ABANDONED_AFTER.total_seconds()
    except OSError:
        return False


def _remove_folder(transport: Transport) -> None:
    """Remove the empty folder; one that holds something of somebody else stays."""
    directory = transport.volume.directory
    if directory is not None:
        try:
            os.rmdir(directory)
        except OSError as error:
            _log.info("%s stays: %s", directory, error.strerror)
