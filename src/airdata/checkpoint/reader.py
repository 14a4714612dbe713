"""Loading: a DCP storage reader that fetches what is needed and checks what it fetches.

    .metadata, integrity record                                                     read_metadata
    load plan ──► byte ranges ──coalesce()──► groups ──threads──► memory ──digests──► tensors        read_data

A contiguous tensor of a checkpoint of ours is read from a directory straight into the destination; a slice of its rows
is read as a slice. Everything else, checkpoints of stock writers included, is decoded with ``torch.load``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from airdata.checkpoint import layout
from airdata.checkpoint.decode import Wanted, cut, deliver, direct_views
from airdata.checkpoint.integrity import Bytes, IntegrityRecord, ItemRecord
from airdata.checkpoint.ranges import Group, coalesce
from airdata.checkpoint.source import Source, open_source
from airdata.checkpoint.verify import verify_files
from airdata.errors import CheckpointError, CorruptCheckpointError
from airdata.transport import open_transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["UCVolumeReader"]

# A group is one read: with 8 threads, 256 MiB in flight at most, unless a single tensor is larger.
_GROUP_BYTES = 32 << 20
_MAX_GAP = 8 << 20
# Of the bytes wanted; leaves room for the block ends under an amplification of 1.05.
_WASTE = 0.03


@dataclass(frozen=True)
class _Job:
    file: str
    group: Group
    items: list[Wanted]


class UCVolumeReader(FileSystemReader):
    """Loads a checkpoint from a volume: one of ours or of any stock DCP writer, saved by any number of ranks.

    Args:
        path: the checkpoint's own folder.
        storage_options: arguments of the fsspec driver.
        verify: ``"items"`` checks every byte that is loaded against its digest; ``"files"`` first checks, in full, all
            files that this rank reads from; ``"off"`` checks nothing. Checkpoints of stock writers have no digests, and
            are checked for missing and short files only.
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
        if threads <= 0:
            raise ValueError(f"threads={threads} must be positive")
        # The base class makes a pathlib.Path of its argument, which breaks URLs: it gets none.
        super().__init__(os.curdir)
        self._volume = Volume.of(path, storage_options)
        self._verify = verify
        self._threads = threads
        self._record: IntegrityRecord | None = None
        self._metadata: Metadata | None = None
        self._provided: layout.Published | None = None

    def provide(self, published: layout.Published) -> None:
        """Use what was read already for the next load, instead of asking storage from every rank."""
        self._provided = published

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path names a volume."""
        try:
            Volume.of(checkpoint_id)
        except ValueError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path, without credentials."""
        return str(self._volume)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Point the reader at another path; the storage options stay."""
        super().reset(None)
        self._record = self._metadata = None
        if checkpoint_id is not None:
            self._volume = Volume.of(checkpoint_id, self._volume.storage_options)

    # No **kwargs: with them DCP would ask a second time, for a file per rank that only use_collectives=False writes.
    def read_metadata(self) -> Metadata:
        """Read ``.metadata`` and the integrity record.

        Raises:
            CheckpointNotFoundError: nothing is published here.
            CorruptCheckpointError: either file is damaged.
        """
        published, self._provided = self._provided, None
        if published is None:
            published = layout.read_published(open_transport(self._volume))
        self._record = published.record
        metadata = published.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Begin a load on this rank."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items.

        Raises:
            CorruptCheckpointError: a file is missing or short, or bytes differ from their digest; names the tensor too.
            CheckpointError: storage failed. Either way the other reads stop, and the destination is not to be used.
        """
        transport = open_transport(self._volume)
        source = open_source(transport)
        try:
            wanted = self._wanted(plan)
            if self._verify == "files" and self._record is not None:
                used = {item.file for item in wanted}
                verify_files(transport, [f for f in self._record.files if f.name in used], threads=self._threads)
            lock = threading.Lock()
            jobs = [
                _Job(file, group, [items[index] for index in group.members])
                for file, items in _by_file(wanted).items()
                for group in coalesce(
                    [(item.start, item.end) for item in items], max_bytes=_GROUP_BYTES, max_gap=_MAX_GAP, waste=_WASTE
                )
            ]
            _run([partial(self._load, source, planner, lock, job) for job in jobs], self._threads)
        except (CheckpointError, OSError) as error:
            raise self._explain(error) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _wanted(self, plan: LoadPlan) -> list[Wanted]:
        assert self._metadata is not None
        records: dict[tuple[str, int], ItemRecord] = {}
        if self._record is not None:
            records = {(file.name, item.offset): item for file in self._record.files for item in file.items}
        checked = self._verify != "off"
        wanted: list[Wanted] = []
        for request in plan.items:
            info = self.storage_data[request.storage_index]
            record = records.get((info.relative_path, info.offset))
            if self._record is not None and record is None:
                raise CorruptCheckpointError(
                    f"{self._volume}: the integrity record does not know {request.storage_index.fqn!r}, "
                    f"{info.relative_path} at byte {info.offset}"
                )
            entry = self._metadata.state_dict_metadata[request.storage_index.fqn]
            chunk = _chunk(entry, request) if isinstance(entry, TensorStorageMetadata) else None
            dtype = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
            block_bytes = self._record.block_bytes if self._record is not None and checked else 0
            wanted += [
                Wanted.of(part, info, record=record, chunk=chunk, dtype=dtype, block_bytes=block_bytes)
                for part in cut(request, record, chunk, dtype)
            ]
        return wanted

    def _load(self, source: Source, planner: LoadPlanner, lock: threading.Lock, job: _Job) -> None:
        """Read one group and hand its items over."""
        try:
            parts = [self._views(item, planner, lock) for item in job.items]
            source.read_into(job.file, job.group.start, _in_order(job, parts))
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


def _chunk(entry: TensorStorageMetadata, request: ReadItem) -> Sequence[int]:
    """The shape of the saved shard that a request reads from."""
    offset = request.storage_index.offset
    hint = request.storage_index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == offset:
        return entry.chunks[hint].sizes
    return next((chunk.sizes for chunk in entry.chunks if offset is None or chunk.offsets == offset), entry.size)


def _in_order(job: _Job, parts: Sequence[tuple[Sequence[Bytes], object]]) -> Sequence[Bytes]:
    """The memory of all items of a group, with room for the gaps between them."""
    views: list[Bytes] = []
    at = job.group.start
    for item, (own, _) in zip(job.items, parts, strict=True):
        views += [np.empty(item.start - at, np.uint8), *own]
        at = item.end
    return views


def _by_file(wanted: Sequence[Wanted]) -> dict[str, list[Wanted]]:
    files: dict[str, list[Wanted]] = {}
    for item in wanted:
        files.setdefault(item.file, []).append(item)
    return files


def _run(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all jobs in threads; the first failure stops those that have not begun, and is raised."""
    failures: list[Exception] = []
    stop = threading.Event()

    def guarded(job: Callable[[], None]) -> None:
        if stop.is_set():
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 - raised below, once every thread has ended
            failures.append(error)
            stop.set()

    with ThreadPoolExecutor(threads, "airdata-load") as pool:
        try:
            list(pool.map(guarded, jobs))
        except BaseException:
            stop.set()
            raise
    if failures:
        raise failures[0]
