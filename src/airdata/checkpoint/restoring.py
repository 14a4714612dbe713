"""Finding the newest valid step, and loading it into the objects of a training job.

steps, newest first ──sizes──► load ──digests──► objects
          ▲                      └─ damaged: the reason to the log, and the next older one, on every rank
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from airdata.checkpoint import layout, retention
from airdata.checkpoint import state as states
from airdata.checkpoint.ranks import Ranks, as_checkpoint_error
from airdata.checkpoint.reader import UCVolumeReader
from airdata.errors import CheckpointNotFoundError, CorruptCheckpointError
from airdata.transport import open_transport
from airdata.volume import Volume

__all__ = ["Verify", "load_step", "newest_valid", "restore"]

_log = logging.getLogger(__name__)

Verify = Literal["off", "items", "files"]
State = MutableMapping[str, Any]


def newest_valid(root: Volume, below: int | None = None) -> tuple[tuple[int, layout.Published] | None, list[str]]:
    """The newest step whose files are all there with their sizes, and why newer ones were passed over.

    Args:
        root: holds the steps.
        below: only older steps than this.
    """
    reasons: list[str] = []
    for step in reversed(retention.published_steps(root)):
        if below is not None and step >= below:
            continue
        try:
            return (step, retention.check_valid(open_transport(root.child(layout.step_name(step))))), reasons
        except CheckpointNotFoundError:
            continue  # removed since the steps were listed
        except CorruptCheckpointError as error:
            _log.warning("step %d is skipped: %s", step, error)
            reasons.append(str(error))
    return None, reasons


def restore(root: Volume, ranks: Ranks, state: State, verify: Verify) -> int | None:
    """Load the newest valid step; see :meth:`CheckpointManager.restore`."""
    skipped: list[str] = []
    below: int | None = None
    while True:
        found, reasons = ranks.decide(lambda limit=below: newest_valid(root, limit))  # type: ignore[misc]
        skipped += reasons
        if found is None:
            if skipped:
                raise CorruptCheckpointError(f"no checkpoint under {root} is valid: {'; '.join(skipped)}")
            return None
        step, published = found
        try:
            _load(root, ranks, (step, published), state, verify)
        except CorruptCheckpointError as error:
            _log.warning("step %d is skipped: %s", step, error)
            skipped.append(str(error))
            below = step
            continue
        return int(step)


def load_step(root: Volume, ranks: Ranks, step: int, state: State, verify: Verify) -> int:
    """Load this step and no other.

    Raises:
        CheckpointNotFoundError: it is not published.
        CorruptCheckpointError: it is damaged; ``state`` may hold parts of it.
    """
    transport = open_transport(root.child(layout.step_name(step)))
    published = ranks.decide(lambda: retention.check_valid(transport))
    _load(root, ranks, (step, published), state, verify)
    return step


def _load(root: Volume, ranks: Ranks, found: tuple[int, layout.Published], state: State, verify: Verify) -> None:
    step, published = found
    reader = UCVolumeReader(root.child(layout.step_name(step)), verify=verify)
    reader.provide(published)
    what = f"loading step {step}"
    # Every rank has its target, or none begins: DCP would wait for the one that failed.
    target = ranks.agree(what, step, lambda: states.targets(state, published.metadata, ranks.rank))
    try:
        with ranks.in_touch(what):
            dcp_load(target, storage_reader=reader, process_group=ranks.group, no_dist=ranks.alone)
    except CheckpointException as error:
        raise as_checkpoint_error(error, what) from error
    states.apply(state, target)
    if ranks.is_coordinator:
        _log.info("restored step %d from %s", step, root)
