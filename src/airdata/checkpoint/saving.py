"""One numbered save, from a staged state dict to a published checkpoint that older ones make room for.

state dict ──dcp.save──► published ──► read back (the first time) ──► older steps go

Runs on the manager's background thread, on every rank, in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from airdata.checkpoint import layout, retention
from airdata.checkpoint.policies import Policy
from airdata.checkpoint.publish import SaveSummary
from airdata.checkpoint.ranks import Ranks, as_checkpoint_error
from airdata.checkpoint.verify import verify_files
from airdata.checkpoint.writer import UCVolumeWriter
from airdata.errors import CheckpointError, OutcomeUnknownError
from airdata.transport import open_transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["Saver"]

_log = logging.getLogger(__name__)


class Saver:
    """Saves steps under a root.

    Args:
        root: holds the steps.
        ranks: that save together.
        policies: what stays; none keep everything.
        prove: whether the first checkpoint is read back, and compared with its digests, before anything older goes.
        writer_options: further arguments of :class:`UCVolumeWriter`.

    Attributes:
        last: what the last save that succeeded did.
    """

    def __init__(
        self, root: Volume, ranks: Ranks, policies: Sequence[Policy], *, prove: bool, writer_options: Mapping[str, Any]
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._policies = policies
        self._prove = prove
        self._writer_options = writer_options
        self.last: SaveSummary | None = None

    def write(self, step: int, tree: dict[str, Any], metrics: Mapping[str, float]) -> SaveSummary:
        """Save a state dict as ``step``.

        Raises:
            CheckpointError: nothing was published; what was published does not read back; or ranks lost touch with each
                other, and it is published if rank 0 came so far.
        """
        place = self._root.child(layout.step_name(step))
        writer = UCVolumeWriter(place, **self._writer_options, metrics=metrics)
        what = f"saving step {step}"
        try:
            with self._ranks.in_touch(what):
                metadata = dcp_save(
                    tree, storage_writer=writer, process_group=self._ranks.group, no_dist=self._ranks.alone
                )
        except CheckpointException as error:
            # What every rank hears from the coordinator: it has not published, unless storage left it in doubt.
            if not any(isinstance(failure, OutcomeUnknownError) for failure, _ in error.failures.values()):
                writer.discard()
            raise as_checkpoint_error(error, what) from error
        except Exception as error:
            # Nothing was heard. The coordinator may publish yet what this rank wrote; only its own files can go.
            if self._ranks.is_coordinator:
                writer.discard()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"saving {writer.checkpoint_id}: {describe(error)}") from error
        summary: SaveSummary = metadata.save_summary
        if self._prove:
            self._read_back(step, place)
            self._prove = False
        self.last = summary
        if self._ranks.is_coordinator:
            self._let_go(step)
        return summary

    def _read_back(self, step: int, place: Volume) -> None:
        """Every rank reads its share of the files, whoever wrote them."""
        start = time.monotonic()
        transport = open_transport(place)
        record = self._ranks.decide(lambda: layout.read_published(transport)).record
        assert record is not None
        share = record.files[self._ranks.rank :: self._ranks.world_size]
        self._ranks.agree(f"reading step {step} back", step, lambda: verify_files(transport, share))
        if self._ranks.is_coordinator:
            _log.info(
                "%s: the first save, %.3f GB, was read back and is as written; it took %.1f s",
                place,
                record.total_bytes / 1e9,
                time.monotonic() - start,
            )

    def _let_go(self, step: int) -> None:
        try:
            removed = retention.prune(self._root, step, self._policies)
        except OSError as error:
            _log.warning("%s: old checkpoints were not removed: %s", self._root, describe(error))
            return
        if removed:
            _log.info("%s: removed steps %s", self._root, ", ".join(map(str, removed)))
