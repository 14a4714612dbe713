"""Numbered checkpoints under a root: save, find the newest valid one, keep the last few.

save(step, state) ──collect──► staged copy ──background thread──► dcp.save ──► publish ──► retention
restore(state)    ◄──────────── newest step that is valid, older ones if it proves damaged ◄── coordinator decides
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typing_extensions import Self

from airdata.checkpoint import layout, retention
from airdata.checkpoint import state as states
from airdata.checkpoint.publish import SaveSummary
from airdata.checkpoint.ranks import Ranks, as_checkpoint_error
from airdata.checkpoint.reader import UCVolumeReader
from airdata.checkpoint.staging import Stager
from airdata.checkpoint.verify import verify_checkpoint
from airdata.checkpoint.writer import UCVolumeWriter
from airdata.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from airdata.transport import open_transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["CheckpointManager"]

_log = logging.getLogger(__name__)

# Local to a machine or its session, or limited to small files (/Workspace: 500 MB).
_FLEETING = re.compile(r"/(tmp|var/tmp|dev/shm|Workspace|dbfs|databricks/driver|local_disk0)(/|$)")


class CheckpointManager:
    """Saves and restores the whole state of a training job.

    ``state`` is a dict of modules (plain, DDP, FSDP2, tensor parallel), optimizers, anything with ``state_dict`` and
    ``load_state_dict`` (schedulers, the data loader), plain values and tensors. :class:`RNGState` and :class:`PerRank`
    are kept for each rank; everything else must be the same on every rank, or a DTensor::

        manager = CheckpointManager("/Volumes/main/models/run-7")
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNGState(), "epoch": 0}
        step = manager.restore(state) or 0

    With more than one rank, make the manager after ``init_process_group``, on every rank, and call ``save``,
    ``restore``, ``wait`` and ``close`` on every rank; it makes a gloo group of its own, so that an NCCL-only default
    group will do. ``steps``, ``latest`` and ``verify`` are for any rank alone.

    Args:
        root: the folder that holds the steps.
        keep_last: how many valid checkpoints stay; None keeps all.
        keep_every: checkpoints of steps that are a multiple of this stay for good.
        async_save: whether ``save`` returns when the state is copied, and writes in the background.
        storage_options: arguments of the fsspec driver.
        verify: how ``restore`` checks what it reads; see :class:`UCVolumeReader`.
        writer_options: further arguments of :class:`UCVolumeWriter`.
        timeout: seconds after which a rank gives up waiting for the others; must exceed the longest save.

    Raises:
        VolumeError: ``root`` names no volume.
        ValueError: ``keep_last`` or ``keep_every`` is not positive.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Volume,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        *,
        async_save: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        verify: Literal["off", "items", "files"] = "items",
        writer_options: Mapping[str, Any] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        for name, value in {"keep_last": keep_last, "keep_every": keep_every}.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        self.root = Volume.of(root, storage_options)
        self.last_save: SaveSummary | None = None
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._async = async_save
        self._verify = verify
        self._writer_options = dict(writer_options or {})
        self._ranks = Ranks(timeout)
        self._stager = Stager()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[SaveSummary] | None = None
        if self._ranks.is_coordinator and _FLEETING.match(self.root.directory or ""):
            warnings.warn(
                f"checkpoints under {self.root} may not outlive this machine or session; use a volume or a bucket",
                stacklevel=2,
            )

    # --- saving --------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Future[SaveSummary]:
        """Save the state as ``step``; one that exists is replaced once the new one is published.

        Waits for the previous save first. Asynchronous: returns when the state is copied, and training may go on.

        Returns:
            The result; done already when ``async_save`` is False. A failure is also raised by the next ``save``,
            ``wait`` or ``close``.

        Raises:
            CheckpointError: the previous save failed; this one failed (synchronous); or ranks differ on the step.
        """
        name = layout.step_name(step)
        self.wait()
        tree = self._ranks.agree(f"saving {self.root}/{name}", name, lambda: self._collect(state))
        if not self._async:
            done: Future[SaveSummary] = Future()
            done.set_result(self._write(step, tree))
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "airdata-checkpoint")
        self._pending = self._thread.submit(self._write, step, tree)
        return self._pending

    def wait(self) -> None:
        """Return when nothing is being saved.

        Raises:
            CheckpointError: the last save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and give back threads and buffers; the manager can be used again.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # the error on its way is the one to see

    def _collect(self, state: Mapping[str, Any]) -> dict[str, Any]:
        tree = states.collect(state, self._ranks.rank)
        return self._stager.stage(tree) if self._async else tree

    def _write(self, step: int, tree: dict[str, Any]) -> SaveSummary:
        writer = UCVolumeWriter(self.root.child(layout.step_name(step)), **self._writer_options)
        try:
            metadata = dcp_save(tree, storage_writer=writer, process_group=self._ranks.group, no_dist=self._ranks.alone)
        except (Exception, CheckpointException) as error:
            writer.discard()
            if isinstance(error, CheckpointException):
                raise as_checkpoint_error(error, f"saving step {step}") from error
            raise CheckpointError(f"saving {writer.checkpoint_id}: {describe(error)}") from error
        summary: SaveSummary = metadata.save_summary
        self.last_save = summary
        if self._ranks.is_coordinator:
            try:
                removed = retention.prune(self.root, step, keep_last=self._keep_last, keep_every=self._keep_every)
            except OSError as error:
                _log.warning("%s: old checkpoints were not removed: %s", self.root, describe(error))
            else:
                if removed:
                    _log.info("%s: removed steps %s", self.root, ", ".join(map(str, removed)))
        return summary

    # --- restoring -----------------------------------------------------------------------------------------------

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Load the newest valid checkpoint into the objects of ``state``; plain values are replaced in it.

        A checkpoint that proves damaged is skipped, with the reason in the log, and the one before it is loaded whole.

        Returns:
            Its step; None when no checkpoint is published under the root.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none is valid; ``state`` may hold parts of one.
            CheckpointError: the newest valid one does not fit ``state``, or storage failed.
        """
        self.wait()
        skipped: list[str] = []
        below: int | None = None
        while True:
            found, reasons = self._ranks.decide(lambda limit=below: self._newest_valid(limit))  # type: ignore[misc]
            skipped += reasons
            if found is None:
                if skipped:
                    raise CorruptCheckpointError(f"no checkpoint under {self.root} is valid: {'; '.join(skipped)}")
                return None
            step, published = found
            try:
                self._load(step, published, state)
            except CorruptCheckpointError as error:
                _log.warning("step %d is skipped: %s", step, error)
                skipped.append(str(error))
                below = step
                continue
            if self._ranks.is_coordinator:
                _log.info("restored step %d from %s", step, self.root)
            return step

    def _newest_valid(self, below: int | None) -> tuple[tuple[int, layout.Published] | None, list[str]]:
        reasons: list[str] = []
        for step in reversed(self.steps()):
            if below is not None and step >= below:
                continue
            try:
                return (step, retention.check_valid(self._transport(step))), reasons
            except CheckpointNotFoundError:
                continue  # removed since the steps were listed
            except CorruptCheckpointError as error:
                _log.warning("step %d is skipped: %s", step, error)
                reasons.append(str(error))
        return None, reasons

    def _load(self, step: int, published: layout.Published, state: MutableMapping[str, Any]) -> None:
        reader = UCVolumeReader(self.root.child(layout.step_name(step)), verify=self._verify)
        reader.provide(published)

        rank = self._ranks.rank
        # Every rank has its target, or none begins: DCP would wait for the one that failed.
        target = self._ranks.agree(
            f"loading step {step}", step, lambda: states.targets(state, published.metadata, rank)
        )
        try:
            dcp_load(target, storage_reader=reader, process_group=self._ranks.group, no_dist=self._ranks.alone)
        except CheckpointException as error:
            raise as_checkpoint_error(error, f"loading step {step}") from error
        states.apply(state, target, rank)

    # --- looking -------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The published steps, ascending."""
        return retention.published_steps(self.root)

    def latest(self) -> int | None:
        """The newest step whose files are all there with their sizes; None when there is none."""
        found, _ = self._newest_valid(None)
        return found[0] if found else None

    def verify(self, step: int) -> None:
        """Read every byte of a step and compare it with the digests of its save.

        Raises:
            CheckpointNotFoundError: the step is not published.
            CorruptCheckpointError: something is missing or differs; names the file.
        """
        verify_checkpoint(self._transport(step))

    def _transport(self, step: int) -> Any:
        return open_transport(self.root.child(layout.step_name(step)))
