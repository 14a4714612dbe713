"""Saving: a DCP storage writer whose checkpoints exist whole or not at all.

    rank 0          is something published, and may it be replaced?                        prepare_global_plan
    every rank      items ──► files of at most 1 GiB ──► storage, digested on the way       write_data
    rank 0          every planned item there? every file of the right size? ──►
                    .integrity.<save id>.json ──► .metadata in one act ──► old files go     finish

A failure of any item on any rank fails the save on all of them: DCP carries it. Nothing that is published is ever
touched: the names of a save are its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from airdata.checkpoint import layout
from airdata.checkpoint.place import OnVolume, check_positive
from airdata.checkpoint.placement import Budget, InPlace, Placement, Upload, check_room, sync_directory
from airdata.checkpoint.publish import SaveSummary, publish, remove_files
from airdata.checkpoint.shardfile import pack
from airdata.checkpoint.shards import FileJob, item_bytes, write_files
from airdata.checkpoint.staged import remove_abandoned
from airdata.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    OutcomeUnknownError,
    StagingFullError,
)
from airdata.transport import Transport, open_transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["UCVolumeWriter"]

_log = logging.getLogger(__name__)


class UCVolumeWriter(OnVolume, StorageWriter):
    """Stores a checkpoint on a volume: a directory, a ``/Volumes`` path or any fsspec URL.

    For ``dcp.save`` and ``dcp.async_save`` (thread or process), with ``no_dist`` or any number of ranks. It is
    configuration only, so it can be pickled, and starts threads only while ``write_data`` runs.

    Args:
        path: the checkpoint's own folder.
        storage_options: arguments of the fsspec driver.
        overwrite: whether a checkpoint at this path may be replaced; it stays whole until the new one is published.
        file_bytes: largest shard file; only a single larger tensor exceeds it. The volumes API takes 5,000 MiB at most.
        threads: files written, or uploaded, at the same time.
        memory_bytes: most bytes held in memory at once on their way to a URL. Files that are too large for a share of
            one thread in it are staged on disk; 1 stages every file.
        staging_dir: local directory for staged files; the system's temporary directory by default.
        staging_bytes: most bytes staged there at once; by default ``threads`` files, or half of what is free.
        metrics: what the checkpoint scored; noted beside it, for retention.

    Raises:
        VolumeError: ``path`` names no volume.
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Volume,
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        file_bytes: int = 1 << 30,
        threads: int = 4,
        memory_bytes: int = 256 << 20,
        staging_dir: str | os.PathLike[str] | None = None,
        staging_bytes: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        check_positive(file_bytes=file_bytes, threads=threads, memory_bytes=memory_bytes, staging_bytes=staging_bytes)
        self._stand_on(path, storage_options)
        self._overwrite = overwrite
        self._file_bytes = file_bytes
        self._threads = threads
        self._memory_bytes = memory_bytes
        self._staging_dir = os.fspath(staging_dir) if staging_dir is not None else None
        self._staging_bytes = staging_bytes
        self._metrics = {name: float(value) for name, value in (metrics or {}).items()}
        self._rank = 0
        self._save_id = ""
        self._started = 0.0
        self._written: list[str] = []

    # --- what DCP calls, in this order ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Point the writer at another path; the storage options stay."""
        self._stand_on(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What ``.metadata`` says of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Begin a save on this rank.

        Raises:
            NotImplementedError: ``use_collectives=False``, whose checkpoints cannot be published in one act.
        """
        if not kwargs.get("use_collectives", True):
            raise NotImplementedError(
                "UCVolumeWriter needs use_collectives=True: without it no rank could publish for all"
            )
        self._rank = int(kwargs.get("rank") or 0)
        # Made here and not sent by the coordinator: with the planner's plan caching, ranks reuse an old plan and would
        # write under an old id. A writer may be used again without reset(), so this is where a save begins.
        self._save_id = layout.new_save_id()
        self._started = time.monotonic()
        self._written = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing remote: one rank asks for all."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse to replace a checkpoint with ``overwrite=False``.

        Raises:
            CheckpointExistsError: one is published here.
        """
        if not self._overwrite:
            try:
                open_transport(self._volume).stat(layout.METADATA)
            except FileNotFoundError:
                return plans
            raise CheckpointExistsError(
                f"{self._volume}: a checkpoint is published here; choose another path or pass overwrite=True"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items.

        Raises:
            StagingFullError: the disk has no room.
            CheckpointError: any other failure; names the file and the cause. What was written is removed.
        """
        transport = open_transport(self._volume)
        sizes = [item_bytes(item) for item in plan.items]
        files = pack(sizes, self._file_bytes, self._threads)
        self._written = [layout.shard_name(self._rank, number, self._save_id) for number in range(len(files))]
        try:
            placement = self._placement(transport, sum(sizes))
            jobs = [
                FileJob(name, [plan.items[i] for i in indexes], sum(sizes[i] for i in indexes))
                for name, indexes in zip(self._written, files, strict=True)
            ]
            results = write_files(jobs, placement, planner, self._threads)
            if self._volume.directory is not None:
                sync_directory(self._volume.directory)
        except Exception as error:
            remove_files(transport, self._written)
            kind = StagingFullError if isinstance(error, StagingFullError) else CheckpointError
            raise kind(f"{self._volume}: rank {self._rank}: {describe(error)}") from error
        if transport.retries and results:
            # One item carries the number of its rank to the coordinator.
            first = results[0]
            results[0] = replace(first, storage_data=replace(first.storage_data, retries=transport.retries))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check everything, publish, and remove the checkpoint that was replaced.

        Raises:
            CheckpointError: an item or a file is not what it must be; nothing was published.
            OutcomeUnknownError: storage did not say whether it published; no file was removed.
        """
        metadata.storage_meta = self.storage_meta()
        stored = {result.index: result.storage_data for part in results for result in part}
        transport = open_transport(self._volume)
        try:
            record = publish(
                transport,
                self._save_id,
                metadata,
                stored,
                ranks=len(results),
                metrics=self._metrics,
            )
        except OutcomeUnknownError:
            self._written = []  # they may belong to a checkpoint yet, whether or not this error reaches the caller
            raise
        summary = SaveSummary(
            self.checkpoint_id,
            self._save_id,
            record.total_bytes,
            len(record.files),
            len(results),
            time.monotonic() - self._started,
            transport.retries + sum(item.retries for item in stored.values()),
        )
        # An attribute set after the pickle reaches every rank, and the parent in the process mode of async_save.
        metadata.save_summary = summary  # type: ignore[attr-defined]
        _log.info("%s", summary)

    # --- the rest ------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Remove what this rank wrote for a save that failed on another rank; never what is published.

        DCP tells a writer of its own failures only. CheckpointManager calls this on every rank after a save of which
        it heard that it failed; while the coordinator may yet publish, only the coordinator may call it.
        """
        transport = open_transport(self._volume)
        try:
            published = set(layout.read_published(transport).files())
        except CheckpointNotFoundError:
            published = set()
        except (CheckpointError, OSError) as error:
            _log.warning("%s: the files of a failed save stay: %s", self._volume, describe(error))
            return
        remove_files(transport, [name for name in self._written if name not in published])

    def _placement(self, transport: Transport, need: int) -> Placement:
        if self._volume.directory is not None:
            os.makedirs(self._volume.directory, exist_ok=True)
            check_room(self._volume.directory, need)
            return InPlace(self._volume.directory)
        staging_dir = self._staging_dir or tempfile.gettempdir()
        os.makedirs(staging_dir, exist_ok=True)
        remove_abandoned(staging_dir)
        limit = self._staging_bytes
        if limit is None:
            limit = min(self._threads * self._file_bytes, shutil.disk_usage(staging_dir).free // 2)
        return Upload(transport, staging_dir, Budget(limit), self._memory_bytes // self._threads)
