"""Between a checkpoint and the one file that other tools read.

    checkpoint ──load──► state dict ──torch.save──► .pt        and back, whole: the same names, values and objects
                                    └─safetensors─► .safetensors               tensors only, by their full names

The state dict is held in memory once; use ``below`` to take a part, such as the weights of the model.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from airdata.checkpoint import layout
from airdata.checkpoint.ranks import as_checkpoint_error
from airdata.checkpoint.reader import UCVolumeReader
from airdata.checkpoint.writer import UCVolumeWriter
from airdata.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from airdata.transport import open_transport
from airdata.volume import Volume

__all__ = ["SUFFIXES", "export_file", "import_file"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")

Progress = Callable[[int], object]


def export_file(checkpoint: Volume, file: str, *, below: str = "", progress: Progress | None = None) -> list[str]:
    """Write a checkpoint into one local file; its suffix says which kind.

    Args:
        checkpoint: its own folder.
        file: must not exist; appears when it is complete.
        below: take only what is under this name, such as ``"model"``, and drop the name.
        progress: called with the bytes of every tensor loaded.

    Returns:
        The names that the file cannot hold, and that were left out: what is no tensor, in safetensors.

    Raises:
        CheckpointNotFoundError: nothing is published there, or nothing is under ``below``.
        CorruptCheckpointError: bytes differ from their digest; no file is written.
        CheckpointExistsError: ``file`` exists.
    """
    save = _save_safetensors if file.endswith(".safetensors") else _save_torch
    if save is _save_safetensors:
        _safetensors()  # missing? Say so before gigabytes are read
    if os.path.exists(file):
        raise CheckpointExistsError(f"{file} exists; choose another name")
    published = layout.read_published(open_transport(checkpoint))
    prefix = f"{below}." if below else ""
    entries = {
        name: entry
        for name, entry in published.metadata.state_dict_metadata.items()
        if name.startswith(prefix) or name == below
    }
    if not entries:
        raise CheckpointNotFoundError(f"{checkpoint}: there is nothing under {below!r}")
    flat: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in entries.items()
    }
    left_out = [name for name, value in flat.items() if value is None] if save is _save_safetensors else []
    for name in left_out:
        del flat[name]
    reader = UCVolumeReader(checkpoint)
    reader.provide(published)
    try:
        dcp_load(flat, storage_reader=reader, planner=_CountingLoad(progress), no_dist=True)
    except CheckpointException as error:
        raise as_checkpoint_error(error, f"reading {checkpoint}") from error
    if save is _save_safetensors:
        tree: Any = {name.removeprefix(prefix): value for name, value in flat.items()}
    else:
        paths = published.metadata.planner_data or {}
        tree = _nested({_under(below, name, paths.get(name, (name,))): value for name, value in flat.items()})
    temporary = f"{file}.{secrets.token_hex(4)}.part"
    try:
        save(tree, temporary)
        os.replace(temporary, file)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return left_out


def import_file(file: str, checkpoint: Volume, *, progress: Progress | None = None) -> None:
    """Publish what one local file holds as a checkpoint.

    Args:
        file: of ``torch.save``, or safetensors by its suffix. Only tensors and plain values are unpickled.
        checkpoint: where; nothing may be published there.
        progress: called with the bytes of every tensor written.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointExistsError: a checkpoint is published there.
        CheckpointError: the file holds other things, or storage failed.
    """
    if not os.path.exists(file):
        raise CheckpointNotFoundError(f"{file}: there is no such file")
    if file.endswith(".safetensors"):
        state: Any = _safetensors().load_file(file)
    else:
        try:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read as tensors and plain values: {error}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} holds a {type(state).__name__} and no dict of named values")
    try:
        dcp_save(
            dict(state),
            storage_writer=UCVolumeWriter(checkpoint, overwrite=False),
            planner=_CountingSave(progress),
            no_dist=True,
        )
    except CheckpointException as error:
        raise as_checkpoint_error(error, f"saving {checkpoint}") from error


class _CountingLoad(DefaultLoadPlanner):
    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        if self._progress is not None:
            self._progress(tensor.numel() * tensor.element_size())


class _CountingSave(DefaultSavePlanner):
    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if self._progress is not None and isinstance(data, torch.Tensor):
            self._progress(data.numel() * data.element_size())
        return data


def _under(below: str, name: str, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is left of an item's path when it is entered at ``below``; a key may hold dots (``0.weight``)."""
    for count in range(len(path) + 1):
        if ".".join(map(str, path[:count])) == below:
            return path[count:]
    return (name.removeprefix(f"{below}."),)


def _nested(leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """A tree from its leaves: DCP notes the keys of dicts, and the positions of lists, that lead to each."""
    if set(leaves) == {()}:
        return leaves[()]
    children: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), value in leaves.items():
        children.setdefault(key, {})[tuple(rest)] = value
    if all(isinstance(key, int) for key in children) and sorted(children) == list(range(len(children))):
        return [_nested(children[key]) for key in range(len(children))]
    return {key: _nested(below) for key, below in children.items()}


def _save_torch(tree: Any, path: str) -> None:
    torch.save(tree, path)


def _save_safetensors(tensors: dict[str, torch.Tensor], path: str) -> None:
    _safetensors().save_file(tensors, path)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise CheckpointError("safetensors files need the package safetensors: pip install safetensors") from None
