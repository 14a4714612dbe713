"""The one act that makes a checkpoint exist, and what must be true before it.

    items written == planned ──► every file there with its size ──► integrity record ──► .metadata ──► leftovers go

Only the coordinator comes here, once per save. An error before the last step publishes nothing; after it nothing fails.
Where the last step may or may not have been done, or may yet be done, every file of both checkpoints stays.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from airdata.checkpoint import layout
from airdata.checkpoint.integrity import FileRecord, IntegrityRecord, ItemRecord, as_bytes, crc32c
from airdata.errors import CheckpointError, CheckpointNotFoundError, OutcomeUnknownError
from airdata.transport import Transport
from airdata.transport.retry import describe
from airdata.volume import Volume

__all__ = ["ABANDONED_AFTER", "SaveSummary", "StoredItem", "publish", "remove_files"]

_log = logging.getLogger(__name__)

# A save that began longer ago than this and is not published never will be; no save takes a day.
ABANDONED_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class SaveSummary:
    """What one save did.

    ``bytes``, ``files`` and ``retries`` (of requests to storage) count all ranks; ``seconds`` is from planning to
    publish on rank 0.
    """

    path: str
    save_id: str
    bytes: int
    files: int
    ranks: int
    seconds: float
    retries: int = 0

    @property
    def gb_per_second(self) -> float:
        """Bytes over seconds, in 10^9 bytes."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return (
            f"saved {self.path}: {self.bytes / 1e9:,.3f} GB in {self.files} files from {self.ranks} ranks, "
            f"{self.seconds:.2f} s, {self.gb_per_second:.2f} GB/s, {self.retries} retries"
        )


@dataclass(frozen=True)
class StoredItem:
    """Where an item lies, and what it took; travels from every rank to the coordinator."""

    file: FileRecord
    item: ItemRecord
    retries: int = 0


def publish(
    transport: Transport,
    save_id: str,
    metadata: Metadata,
    stored: Mapping[MetadataIndex, StoredItem],
    *,
    ranks: int,
    metrics: Mapping[str, float] | None = None,
) -> IntegrityRecord:
    """Publish a save, and remove what it replaces.

    Args:
        transport: of the checkpoint's own folder.
        save_id: names the integrity record.
        metadata: DCP's plan of the whole checkpoint, with ``storage_meta``; receives ``storage_data``.
        stored: every item that any rank wrote.
        ranks: how many ranks saved.
        metrics: noted in the integrity record.

    Raises:
        CheckpointError: something is missing or has the wrong size, or storage failed; nothing was published, and the
            files of this save are removed.
        OutcomeUnknownError: storage did not say whether it has published; nothing is removed, old or new.
    """
    name = transport.volume
    files = tuple({s.file.name: s.file for s in stored.values()}.values())
    record_name = layout.integrity_name(save_id)
    try:
        _check_items(name, metadata, stored)
        layout.check_sizes(transport, {file.name: file.size for file in files})
        replaced = _names_at(transport)
        metadata.storage_data = {
            index: layout.StorageInfo(s.file.name, s.item.offset, s.item.length) for index, s in stored.items()
        }
        # A fresh object: with plan caching DCP hands over that of the last save, with the summary we hung on it.
        data = pickle.dumps(dataclasses.replace(metadata))
        # A planner may put anything into its planner_data; what cannot be read back must not be published.
        layout.load_metadata(data, f"{name}/{layout.METADATA}")
        record = IntegrityRecord(
            save_id=save_id,
            metadata_size=len(data),
            metadata_crc32c=crc32c(as_bytes(data)),
            files=files,
            ranks=ranks,
            torch=str(torch.__version__),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            metrics=dict(metrics or {}),
        )
        transport.put(record_name, record.to_bytes())
        doubt = _put_metadata(transport, data)
    except Exception as error:
        remove_files(transport, [*(file.name for file in files), record_name])
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: the checkpoint was not published: {describe(error)}") from error
    if doubt is not None:
        raise OutcomeUnknownError(
            errno.ETIMEDOUT,
            f"{name}: whether the checkpoint was published is not known, and it may yet be. No file was removed; once "
            f"storage answers, the new checkpoint is there or what was there before: {describe(doubt)}",
        ) from doubt
    _remove_leftovers(transport, replaced, record)
    return record


def _put_metadata(transport: Transport, data: bytes) -> OSError | None:
    """Publish.

    Returns:
        None when it is published; why it is not known whether it is, or will be, otherwise.

    Raises:
        OSError: it is not published.
    """
    try:
        transport.put(layout.METADATA, data)
    except OutcomeUnknownError as error:
        return error
    except OSError:
        # The answer may have been lost and not the request: what is there now decides.
        try:
            published = transport.read(layout.METADATA)
        except FileNotFoundError:
            published = None
        except OSError as error:
            return error
        if published != data:
            raise
    return None


def _check_items(name: Volume, metadata: Metadata, stored: Mapping[MetadataIndex, StoredItem]) -> None:
    # Stock DCP publishes what its writer threads left, however little (pytorch#191391).
    odd = sorted(map(str, set(layout.item_indexes(metadata)) ^ stored.keys()))
    if odd:
        raise CheckpointError(f"{name}: {len(odd)} items were planned or written, not both: {', '.join(odd[:3])}")


def remove_files(transport: Transport, names: Sequence[str]) -> None:
    """Remove files, best effort: what stays is named in the log, and no checkpoint refers to it."""
    for name in names:
        _remove_file(transport, name)


def _remove_file(transport: Transport, name: str) -> None:
    try:
        transport.delete(name)
    except OSError as error:
        _log.warning("%s/%s could not be removed: %s", transport.volume, name, describe(error))


def _names_at(transport: Transport) -> Sequence[str]:
    """The files of the checkpoint that is published here now."""
    try:
        return list(layout.read_published(transport).owned())
    except CheckpointNotFoundError:
        return []
    except CheckpointError as error:
        _log.warning("%s; it will be replaced, and its other files stay", error)
        return []


def _remove_leftovers(transport: Transport, replaced: Sequence[str], record: IntegrityRecord) -> None:
    """Remove the files of the replaced checkpoint, and those that a killed save left long ago."""
    own = {file.name for file in record.files} | {layout.integrity_name(record.save_id)}
    try:
        abandoned = [f.path for f in transport.list() if layout.is_abandoned(f, ABANDONED_AFTER)]
    except OSError as error:
        _log.warning("%s: leftovers were not looked for: %s", transport.volume, describe(error))
        abandoned = []
    remove_files(transport, sorted({*replaced, *abandoned} - own))
