"""Copying a state dict to host memory, so that training can go on while it is saved.

    tensors on any device ──one pass──► one slab of host memory, page-locked where there is CUDA, kept for the next save

The copy is the only thing an asynchronous save makes training wait for. A fresh pageable buffer costs 40 times as
much as a page-locked one that is there already (8.6 GB on an H200: 6.9 s against 0.16 s), so the slab is made once and
reused. A staged state dict is therefore valid until the next ``stage``: wait for one save before staging another.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Stager"]

_log = logging.getLogger(__name__)

# The widest alignment that a copy engine or a vectorised kernel profits from.
_ALIGNMENT = 512


class Stager:
    """Stages state dicts into one reused buffer; also a stager for ``dcp.async_save(async_stager=...)``.

    CPU tensors are copied as well: what training does to them later must not show. Tensors that share memory and shape
    (tied weights) are copied once. DTensors keep their mesh and placements around a local tensor on the CPU.
    """

    # Read by dcp.async_save: stage() has copied everything when it returns.
    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._release: weakref.finalize[Any, Any] | None = None
        self._stream: torch.cuda.Stream | None = None

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state dict: nested mappings, lists and tuples of tensors and other values.

        Returns:
            The same structure with every tensor on the CPU and everything else copied. Valid until the next call.

        Raises:
            NotImplementedError: it holds a ShardedTensor.
        """
        places = _Places()
        places.add(state_dict)
        if places.total > self._slab.numel():
            self._allocate(places.total)
        if not places.cuda:
            return dict(places.copy(state_dict, self._slab))
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged = dict(places.copy(state_dict, self._slab))
        self._stream.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """Nothing is pending after ``stage``."""

    def close(self) -> None:
        """Give the buffer back."""
        if self._release is not None:
            self._release()
            self._release = None
        self._slab = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, size: int) -> None:
        self.close()
        self._slab = torch.empty(size, dtype=torch.uint8)
        if torch.cuda.is_available():
            # Registered and not pin_memory=True: torch's allocator of pinned memory rounds up to a power of two, which
            # for 9 GB would lock 16.
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(cudart.cudaHostRegister(self._slab.data_ptr(), size, 0)) == 0:
                self._release = weakref.finalize(self, _unregister, self._slab)
            else:
                _log.warning("%.1f GB of host memory could not be page-locked; staging will be slower", size / 1e9)


def _unregister(slab: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())  # type: ignore[no-untyped-call]


def _own(value: Any) -> Any:
    """A copy whose tensors have memory of their own, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _own(child) for name, child in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_own(child) for child in value)
    return copy.deepcopy(value)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not hasattr(tensor, "__tensor_flatten__")


class _Places:
    """Where in the slab each tensor goes."""

    def __init__(self) -> None:
        self.total = 0
        self.cuda = False
        self._offsets: dict[tuple[Any, ...], int] = {}
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(self, value: Any) -> None:
        """Find room for every tensor in ``value``."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, Mapping):
            for child in value.values():
                self.add(child)
        elif isinstance(value, list):
            for child in value:
                self.add(child)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "local_shards"):
            raise NotImplementedError(
                "asynchronous saves cannot stage a ShardedTensor (FSDP1 sharded state dicts); use FSDP2, or "
                "async_save=False"
            )
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                # torch 2.13 counts a DTensor's mesh among its parts, which are tensors otherwise.
                self.add(getattr(tensor, name))
        elif _plain(tensor) and tensor.numel() and _key(tensor) not in self._offsets:
            self.cuda |= tensor.is_cuda
            self._offsets[_key(tensor)] = self.total
            self.total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT

    def copy(self, value: Any, slab: torch.Tensor) -> Any:
        """The copy of ``value``, with its tensors in ``slab``."""
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, slab)
        if isinstance(value, Mapping):
            return {name: self.copy(child, slab) for name, child in value.items()}
        if isinstance(value, list):
            return [self.copy(child, slab) for child in value]
        # DCP takes dicts and lists apart; anything else it pickles as one item, and the pickle of a view of the slab
        # would hold the whole slab.
        return _own(value)

    def _copy_tensor(self, tensor: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            inner = {
                name: self._copy_tensor(part, slab) if isinstance(part, torch.Tensor) else part
                for name, part in parts.items()
            }
            unflatten = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
            rebuilt: torch.Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
            return rebuilt
        if not _plain(tensor) or not tensor.numel():
            return tensor.clone().cpu()
        key = _key(tensor)
        if key not in self._copies:
            start = self._offsets[key]
            raw = slab[start : start + tensor.numel() * tensor.element_size()]
            target = raw.view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
            self._copies[key] = target
        return self._copies[key]
