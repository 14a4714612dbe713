"""What lies on storage.

    <checkpoint>/__<rank>_<n>.<save id>.distcp     shard files: items one after another, each what torch.save writes
                 .integrity.<save id>.json         their digests (airdata.checkpoint.integrity)
                 .metadata                         DCP's pickle; the checkpoint exists if and only if this file does
                 .airdata-<chance>.part            either of these two, not renamed yet
    <root>/step-00000042/                          a numbered checkpoint under a root

Names carry the id of their save, so that a second save to the same path never touches a published byte; the id starts
with the time of the save, so that what a killed save left can be told from what a running one writes.
``.metadata`` is a pickle, and a pickle can run any code: it is read with an unpickler that admits only DCP's own
classes.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # the one private name: what every stock reader needs
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from airdata.checkpoint.integrity import IntegrityRecord, as_bytes, crc32c
from airdata.errors import CheckpointNotFoundError, CorruptCheckpointError
from airdata.transport import FileInfo, Transport

__all__ = [
    "METADATA",
    "Published",
    "StorageInfo",
    "check_sizes",
    "integrity_name",
    "is_abandoned",
    "is_leftover",
    "item_indexes",
    "load_metadata",
    "new_save_id",
    "read_published",
    "save_time",
    "shard_name",
    "shard_save_id",
    "step_name",
    "step_of",
]

StorageInfo = _StorageInfo

METADATA = ".metadata"
_TIME = "%Y%m%dT%H%M%SZ"
_ID = r"(\d{8}T\d{6}Z-[0-9a-f]{8})"
_SHARD = re.compile(rf"__\d+_\d+\.{_ID}\.distcp")
_RECORD = re.compile(rf"\.integrity\.{_ID}\.json")
# What airdata.transport.local writes first, and renames: .metadata and the record, on a directory.
_PART = re.compile(r"\.airdata-[0-9a-f]{16}\.part")
_STOCK_SHARD = re.compile(r"__\d+_\d+\.distcp")
_MTIME = re.compile(r"mtime:(\d+)")
# fullmatch on these digits: a looser search takes step-100.bak for a step (torchtitan's _find_load_step).
_STEP = re.compile(r"step-(\d{8,})")


def new_save_id() -> str:
    """A name for one save by one rank: its UTC time, and chance."""
    return f"{datetime.now(timezone.utc).strftime(_TIME)}-{secrets.token_hex(4)}"


def save_time(save_id: str) -> datetime:
    """When a save began."""
    return datetime.strptime(save_id.partition("-")[0], _TIME).replace(tzinfo=timezone.utc)


def shard_name(rank: int, number: int, save_id: str) -> str:
    """The name of a shard file."""
    return f"__{rank}_{number}.{save_id}.distcp"


def shard_save_id(name: str) -> str | None:
    """The save that a shard file or an integrity record belongs to; None when airdata did not write it."""
    found = _SHARD.fullmatch(name) or _RECORD.fullmatch(name)
    return found[1] if found else None


def integrity_name(save_id: str) -> str:
    """The name of a save's integrity record."""
    return f".integrity.{save_id}.json"


def step_name(step: int) -> str:
    """The folder of a step."""
    if step < 0:
        raise ValueError(f"step={step} must not be negative")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step a folder holds, or None when its name is not exactly what :func:`step_name` gives."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def is_leftover(name: str) -> bool:
    """Whether a file, unless something published names it, is of a save: one that goes on, or one that was killed."""
    return bool(shard_save_id(name) or _PART.fullmatch(name))


def is_abandoned(file: FileInfo, older_than: timedelta) -> bool:
    """Whether a file is one of ours from a save that began, or stopped writing it, longer ago than ``older_than``."""
    save_id = shard_save_id(file.path)
    if save_id is not None:
        began = save_time(save_id)
    elif _PART.fullmatch(file.path) and (found := _MTIME.fullmatch(file.version)):
        began = datetime.fromtimestamp(int(found[1]) / 1e9, timezone.utc)
    else:
        return False
    return datetime.now(timezone.utc) - began > older_than


@dataclass(frozen=True)
class Published:
    """A checkpoint that exists.

    Attributes:
        name: where, for messages.
        metadata: DCP's own.
        record: digests of its bytes; None for a checkpoint that airdata did not write.
    """

    name: str
    metadata: Metadata
    record: IntegrityRecord | None

    def files(self) -> dict[str, int | None]:
        """Every shard file and its size; None where only a lower limit is known."""
        if self.record is not None:
            return {file.name: file.size for file in self.record.files}
        return {info.relative_path: None for info in (self.metadata.storage_data or {}).values()}

    def owned(self) -> Iterator[str]:
        """The names of the files that are this checkpoint's to delete; nothing outside its folder, whatever it says."""
        for name in self.files():
            if _SHARD.fullmatch(name) or _STOCK_SHARD.fullmatch(name):
                yield name
        if self.record is not None:
            yield integrity_name(self.record.save_id)


def item_indexes(metadata: Metadata) -> Iterator[MetadataIndex]:
    """Every item that a checkpoint with this metadata must hold."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                yield MetadataIndex(fqn, chunk.offsets)
        else:
            assert isinstance(entry, BytesStorageMetadata)
            yield MetadataIndex(fqn)


def read_published(transport: Transport, read: Callable[[str], bytes] | None = None) -> Published:
    """Read and check what says that a checkpoint exists: ``.metadata`` and the integrity record.

    Args:
        transport: of the checkpoint's own folder.
        read: gets the content of a file, in place of ``transport.read``.

    Raises:
        CheckpointNotFoundError: nothing is published here.
        CorruptCheckpointError: either file is damaged, or the record is missing.
    """
    data = _read_metadata(transport, read or transport.read)
    try:
        return _check_metadata(transport, data, read or transport.read)
    except CorruptCheckpointError:
        # Another save may have been published between the two reads, and have removed the record of the first.
        if _read_metadata(transport, transport.read) == data:
            raise
    return read_published(transport)


def _read_metadata(transport: Transport, read: Callable[[str], bytes]) -> bytes:
    try:
        return read(METADATA)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{transport.volume}: no checkpoint is published here (there is no {METADATA}); a save that has not "
            f"ended, or was killed, publishes nothing"
        ) from None


def _check_metadata(transport: Transport, data: bytes, read: Callable[[str], bytes]) -> Published:
    name = str(transport.volume)
    metadata = load_metadata(data, f"{name}/{METADATA}")
    ours = any(shard_save_id(info.relative_path) for info in metadata.storage_data.values())
    save_id = getattr(metadata.storage_meta, "save_id", None) or ""
    record_name = integrity_name(save_id)
    if not ours and not _RECORD.fullmatch(record_name):
        return Published(name, metadata, None)
    try:
        record = IntegrityRecord.from_bytes(read(record_name), f"{name}/{record_name}")
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{name}: the integrity record {record_name} is missing") from None
    if (record.metadata_size, record.metadata_crc32c) != (len(data), crc32c(as_bytes(data))):
        raise CorruptCheckpointError(
            f"{name}/{METADATA}: {len(data)} bytes with another crc32c than the {record.metadata_size} "
            f"that were published"
        )
    return Published(name, metadata, record)


def check_sizes(transport: Transport, files: dict[str, int | None]) -> None:
    """Compare the sizes of files in storage with what they must be: one listing.

    Raises:
        CorruptCheckpointError: a file is missing or has another size; names it.
    """
    found = {file.path: file.size for file in transport.list()}
    for name, size in files.items():
        if name not in found:
            # A listing may lag behind writes on a mount or an eventually consistent store; a stat decides.
            try:
                found[name] = transport.stat(name).size
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{transport.volume}/{name} is missing") from None
        if size is not None and found[name] != size:
            raise CorruptCheckpointError(
                f"{transport.volume}/{name} holds {found[name]} bytes, and {size} were written"
            )


# --- .metadata ---------------------------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # torch <= 2.2
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    # The checkpoint_id that stock writers note is a Path.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not one of DCP's classes")


def load_metadata(data: bytes, name: str) -> Metadata:
    """Unpickle ``.metadata``; ``name`` is its path, for messages.

    Raises:
        CorruptCheckpointError: it does not unpickle, or names anything but DCP's own classes.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise CorruptCheckpointError(
            f"{name} ({len(data)} bytes) is no DCP metadata, or is damaged: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CorruptCheckpointError(f"{name} holds a {type(metadata).__name__} without storage data; not DCP metadata")
    return metadata
