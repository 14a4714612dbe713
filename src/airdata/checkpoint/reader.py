"""Loading: a DCP storage reader that fetches what is needed and checks what it fetches.

    .metadata, integrity record                                                     read_metadata
    load plan ──► byte ranges ──coalesce()──► groups ──threads──► memory ──digests──► tensors        read_data

A contiguous tensor of a checkpoint of ours is read from a directory straight into the destination; a slice of its rows
is read as a slice. Everything else, checkpoints of stock writers included, is decoded with ``torch.load``. From a
store, what several ranks of a node need is fetched once for all of them (airdata.checkpoint.sharing).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from airdata.checkpoint import layout
from airdata.checkpoint.decode import Wanted, deliver, direct_views
from airdata.checkpoint.integrity import Bytes, IntegrityRecord
from airdata.checkpoint.jobs import Job, in_turn, make_jobs
from airdata.checkpoint.node import NodeFolder
from airdata.checkpoint.place import OnVolume, check_positive
from airdata.checkpoint.sharing import Share, SharedSource, offer, share_out
from airdata.checkpoint.source import Source, open_source
from airdata.checkpoint.verify import verify_files, verify_for_node
from airdata.checkpoint.workers import each
from airdata.errors import CheckpointError, CorruptCheckpointError
from airdata.transport import Transport, open_transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["UCVolumeReader"]


class UCVolumeReader(OnVolume, FileSystemReader):
    """Loads a checkpoint from a volume: one of ours or of any stock DCP writer, saved by any number of ranks.

    Args:
        path: the checkpoint's own folder.
        storage_options: arguments of the fsspec driver.
        verify: ``"items"`` checks every byte that is loaded against its digest; ``"files"`` first checks, in full, all
            files that this rank reads from, each once for the ranks of a node; ``"off"`` checks nothing. Checkpoints
            of stock writers have no digests, and are checked for missing and short files only.
        threads: reads in flight.

    Raises:
        VolumeError: ``path`` names no volume.
        ValueError: an unknown level, or no threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Volume,
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: Literal["off", "items", "files"] = "items",
        threads: int = 8,
    ) -> None:
        if verify not in {"off", "items", "files"}:
            raise ValueError(f"verify={verify!r} must be 'off', 'items' or 'files'")
        check_positive(threads=threads)
        # The base class makes a pathlib.Path of its argument, which breaks URLs: it gets none.
        super().__init__(os.curdir)
        self._stand_on(path, storage_options)
        self._verify = verify
        self._threads = threads
        self._record: IntegrityRecord | None = None
        self._metadata: Metadata | None = None
        self._provided: layout.Published | None = None
        self._folder: NodeFolder | None = None

    def provide(self, published: layout.Published) -> None:
        """Use what was read already for the next load, instead of asking storage from every rank."""
        self._provided = published

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Point the reader at another path; the storage options stay."""
        super().reset(None)
        self._record = self._metadata = None
        self._stand_on(checkpoint_id)

    # No **kwargs: with them DCP would ask a second time, for a file per rank that only use_collectives=False writes.
    def read_metadata(self) -> Metadata:
        """Read ``.metadata`` and the integrity record.

        Raises:
            CheckpointNotFoundError: nothing is published here.
            CorruptCheckpointError: either file is damaged.
        """
        published, self._provided = self._provided, None
        if published is None:
            published = self._read_published(open_transport(self._volume))
        self._record = published.record
        metadata = published.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _read_published(self, transport: Transport) -> layout.Published:
        """``.metadata`` and the record, which grow with tensors times ranks: once for the processes of a node."""
        self._leave()
        if self._can_share and _in_company():
            with suppress(FileNotFoundError):
                found = transport.stat(layout.METADATA)
                if found.version:
                    self._folder = NodeFolder.join(f"{self._volume.url} {found.size} {found.version}")
        folder = self._folder
        if folder is None:
            return layout.read_published(transport)
        return layout.read_published(transport, lambda name: folder.once(name, lambda: transport.read(name)))

    def _leave(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.leave()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Begin a load on this rank."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator what this rank would read; nothing remote."""
        return offer(plan, [job.read for job in self._jobs(plan)]) if self._can_share else plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Find what several ranks of a node would read."""
        return share_out(plans) if self._can_share else plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items.

        Raises:
            CorruptCheckpointError: a file is missing or short, or bytes differ from their digest; names the tensor too.
            CheckpointError: storage failed. Either way the other reads stop, and the destination is not to be used.
        """
        transport = open_transport(self._volume)
        source = open_source(transport)
        try:
            jobs = self._jobs(plan)
            if self._verify == "files" and self._record is not None:
                self._verify_files(transport, self._record, {job.file for job in jobs})
            if isinstance(plan.storage_data, Share):
                share = plan.storage_data
                jobs = in_turn(jobs, share.place, share.ranks, self._threads)
                with closing(SharedSource(source, share, [job.read for job in jobs])) as shared:
                    self._read(jobs, shared, planner)
            else:
                self._read(jobs, source, planner)
        except (CheckpointError, OSError) as error:
            raise self._explain(error) from error
        finally:
            self._leave()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def _can_share(self) -> bool:
        """Whether what one process of a node fetches is worth keeping for the others: local files are in memory."""
        return not self._volume.in_place

    def _verify_files(self, transport: Transport, record: IntegrityRecord, names: Collection[str]) -> None:
        if _in_company():
            verify_for_node(transport, record, names, threads=self._threads)
        else:
            verify_files(transport, [f for f in record.files if f.name in names], threads=self._threads)

    def _jobs(self, plan: LoadPlan) -> Sequence[Job]:
        assert self._metadata is not None
        return make_jobs(plan, self._metadata, self._record, check=self._verify != "off")

    def _read(self, jobs: Sequence[Job], source: Source, planner: LoadPlanner) -> None:
        lock = threading.Lock()
        each(partial(self._load, source, planner, lock), jobs, self._threads, "airdata-load", threading.Event())

    def _load(self, source: Source, planner: LoadPlanner, lock: threading.Lock, job: Job) -> None:
        """Read one group and hand its items over."""
        try:
            parts = [self._views(item, planner, lock) for item in job.items]
            source.read_into(job.file, job.start, _in_order(job, parts))
            for item, (views, target) in zip(job.items, parts, strict=True):
                item.check(views)
                if target is None:
                    deliver(item, views[0], planner, lock, self.transforms)
                    continue
                with lock:
                    planner.commit_tensor(item.request, target)
        except CheckpointError as error:
            names = f"{job.items[0].fqn!r}" + (f" and {len(job.items) - 1} more" if len(job.items) > 1 else "")
            raise type(error)(f"{error} (loading {names} from {self._volume})") from error

    @staticmethod
    def _views(item: Wanted, planner: LoadPlanner, lock: threading.Lock) -> tuple[Sequence[Bytes], torch.Tensor | None]:
        """Memory for an item: around and in the destination tensor, if its bytes can go there; else a buffer."""
        if item.rows is not None:
            with lock:
                target = planner.resolve_tensor(item.request).detach()
            views = direct_views(item, target)
            if views is not None:
                return views, target
        return [np.empty(item.end - item.start, np.uint8)], None

    def _explain(self, error: Exception) -> CheckpointError:
        """The error to raise: a checkpoint that was replaced while it was being read is not a corrupt one."""
        before = self._record.save_id if self._record is not None else None
        if before is not None and isinstance(error, CorruptCheckpointError):
            try:
                now = layout.read_published(open_transport(self._volume)).record
            except (CheckpointError, OSError):
                now = self._record
            if now is None or now.save_id != before:
                return CheckpointError(
                    f"{self._volume} was replaced by another save while it was loaded; load it again"
                )
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"{self._volume}: {describe(error)}")


def _in_company() -> bool:
    """Whether other processes are likely to load the same: a job of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _in_order(job: Job, parts: Sequence[tuple[Sequence[Bytes], object]]) -> Sequence[Bytes]:
    """The memory of all items of a group, with room for the gaps between them."""
    views: list[Bytes] = []
    at = job.start
    for item, (own, _) in zip(job.items, parts, strict=True):
        views += [np.empty(item.start - at, np.uint8), *own]
        at = item.end
    return views
