"""What a training job keeps in one checkpoint, to and from DCP's state dict.

    modules, optimizers      torch's get_state_dict / set_state_dict: full names, the same under DDP, FSDP2, TP or none
    loader, scheduler, ...   state_dict(), as one pickled item: whatever it held comes back exactly
    plain values             one pickled item each; tensors as tensors
    PerRank, RNGState        one item for each rank
    airdata's loader         one item for each rank, which are equal unless a wrapper drops or adds samples

On another world size the values that are kept per rank are restored where the rank exists in the checkpoint; a rank
that does not exist there keeps its own and says so in a warning. A loader takes rank 0's, which it refuses if that
is not the position of every rank.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from airdata.errors import CheckpointError

__all__ = ["PerRank", "RNGState", "apply", "collect", "targets"]

# A larger tensor inside a state is stored as a tensor: sharded if it is a DTensor, and read straight into memory.
_LARGE_TENSOR = 1 << 20


class PerRank:
    """Keeps a value, or an object with ``state_dict``, apart for each rank: a loader whose state differs, a counter.

    Attributes:
        value: the object, or the plain value, which is replaced by ``restore``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class RNGState:
    """The random number generators of this process: torch, the current CUDA device, NumPy and Python."""

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is the one whose state is lost
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put every generator back."""
        torch.set_rng_state(state_dict["torch"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        random.setstate(state_dict["python"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])


def collect(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state dict to save for this rank.

    Raises:
        TypeError: a value is, or holds, something that cannot be saved at this place.
    """
    tree: dict[str, Any] = {}
    for name, value in state.items():
        if _kept_apart(value):
            tree[name] = {_rank_key(rank): _boxed(name, _content(_unwrap(value)))}
        elif isinstance(value, torch.nn.Module):
            tree[name] = get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            tree[name] = _optimizer_state(state, value)
        elif isinstance(value, torch.Tensor):
            tree[name] = value
        else:
            content = _content(value)
            tree[name] = content if _structured(content) else _boxed(name, content)
    return tree


def targets(state: Mapping[str, Any], metadata: Metadata, rank: int) -> dict[str, Any]:
    """The state dict that DCP shall fill from a checkpoint, for :func:`apply`.

    Args:
        state: as it was given to :func:`collect`, maybe on another world size.
        metadata: of the checkpoint.
        rank: of this process.

    Raises:
        CheckpointError: the checkpoint lacks something that ``state`` names.
    """
    wanted = {name: _target(state, name, value, metadata, rank) for name, value in state.items()}
    return {name: target for name, target in wanted.items() if target is not None}


def apply(state: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Hand what was loaded to the objects of ``state``; plain values are replaced in ``state`` itself."""
    for name, value in loaded.items():
        _apply(state, name, value)


# --- saving --------------------------------------------------------------------------------------------------------


def _rank_key(rank: int) -> str:
    return f"rank-{rank:05d}"


def _kept_apart(value: Any) -> bool:
    return isinstance(value, (PerRank, RNGState)) or _speaks_for_all(value)


def _speaks_for_all(value: Any) -> bool:
    """Whether the state of one rank may be that of all, as the object itself will tell when it takes it up."""
    return bool(getattr(value, "state_speaks_for_all_ranks", False))


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value


def _stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _content(value: Any) -> Any:
    return value.state_dict() if _stateful(value) else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


def _structured(content: Any) -> bool:
    """Whether a state holds tensors that must be stored as tensors."""
    return isinstance(content, Mapping) and any(
        isinstance(leaf, torch.Tensor)
        and (hasattr(leaf, "__tensor_flatten__") or leaf.numel() * leaf.element_size() >= _LARGE_TENSOR)
        for leaf in _leaves(content)
    )


def _boxed(name: str, content: Any) -> tuple[Any]:
    """One pickled item. DCP takes dicts and lists apart and loads only the keys it knows; a tuple it leaves whole."""
    for leaf in _leaves(content):
        if _stateful(leaf):
            raise TypeError(
                f"{name!r} holds a {type(leaf).__name__}; give it a place of its own at the top of the state"
            )
    return (_on_cpu(content),)


def _on_cpu(value: Any) -> Any:
    """Tensors on the CPU: a pickled CUDA tensor would come back on the GPU of the rank that saved it."""
    if isinstance(value, torch.Tensor):
        # A clone: the pickle of a view holds all of the memory it looks at.
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _on_cpu(child) for name, child in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_on_cpu(child) for child in value)
    return value


def _owner(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The module whose parameters an optimizer has."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}
    for module in (*modules.values(), torch.nn.ModuleDict(modules)):
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise TypeError(
        "the modules of the state do not hold all parameters of its optimizer; put the module in the state too"
    )


def _optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    unstepped = not optimizer.state
    found = dict(get_optimizer_state_dict(_owner(state, optimizer), optimizer))
    if unstepped:
        # torch fills a fresh optimizer with a step of zeros (Adam's counter would start at 1). It shall stay as it was.
        optimizer.state.clear()
        found["state"] = {}
    return found


# --- loading -------------------------------------------------------------------------------------------------------


def _target(state: Mapping[str, Any], name: str, value: Any, metadata: Metadata, rank: int) -> Any:
    """What DCP shall fill for one entry of the state; None to leave it as it is."""
    keys = metadata.state_dict_metadata
    below = {key for key in keys if key.startswith(f"{name}.")}
    if _kept_apart(value):
        for candidate in (rank, 0) if _speaks_for_all(value) else (rank,):
            if f"{name}.{_rank_key(candidate)}" in keys:
                return {_rank_key(candidate): (None,)}
        if not below:
            raise _missing(name, metadata)
        warnings.warn(
            f"{name!r} was saved by {len(below)} ranks and not by rank {rank}, which keeps its own", stacklevel=2
        )
        return None
    if isinstance(value, torch.nn.Module):
        return get_model_state_dict(value)
    if name not in keys and not below:
        raise _missing(name, metadata)
    if isinstance(value, torch.optim.Optimizer):
        saved = {key.removeprefix(f"{name}.state.") for key in below if key.startswith(f"{name}.state.")}
        return _optimizer_target(state, value, saved)
    if isinstance(keys.get(name), BytesStorageMetadata):
        return (None,)
    return value if isinstance(value, torch.Tensor) else _content(value)


def _missing(name: str, metadata: Metadata) -> CheckpointError:
    held = sorted({key.partition(".")[0] for key in metadata.state_dict_metadata})
    return CheckpointError(f"the checkpoint has no {name!r}; it holds {', '.join(held)}")


def _optimizer_target(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, saved: set[str]) -> dict[str, Any]:
    unstepped = not optimizer.state
    found = dict(get_optimizer_state_dict(_owner(state, optimizer), optimizer))
    if not saved:
        if unstepped:
            optimizer.state.clear()
        return {"param_groups": found["param_groups"]}
    # A parameter that never had a gradient has no state; torch makes one up for every parameter of a fresh optimizer.
    entries_of: Any = found["state"]
    held = {fqn for fqn, entries in entries_of.items() if any(f"{fqn}.{entry}" in saved for entry in entries)}
    return {"state": {fqn: entries_of[fqn] for fqn in held}, "param_groups": found["param_groups"]}


def _apply(state: MutableMapping[str, Any], name: str, loaded: Any) -> None:
    value = state[name]
    if isinstance(value, torch.nn.Module):
        set_model_state_dict(value, loaded)
    elif isinstance(value, torch.optim.Optimizer):
        _apply_optimizer(state, value, loaded)
    elif _kept_apart(value):
        ((content,),) = loaded.values()
        inner = _unwrap(value)
        if _stateful(inner):
            inner.load_state_dict(content)
        else:
            assert isinstance(value, PerRank)
            value.value = _replaced(inner, content)
    else:
        content = loaded[0] if isinstance(loaded, tuple) else loaded
        if _stateful(value):
            value.load_state_dict(content)
        else:
            state[name] = _replaced(value, content)


def _replaced(value: Any, content: Any) -> Any:
    """The new value; a dict or a list stays the object that others may hold."""
    if isinstance(value, dict) and isinstance(content, dict):
        if value is not content:
            value.clear()
            value.update(content)
        return value
    if isinstance(value, list) and isinstance(content, list):
        value[:] = content
        return value
    return content


def _apply_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    if "state" in loaded:
        module = _owner(state, optimizer)
        set_optimizer_state_dict(module, optimizer, loaded, options=StateDictOptions(strict=False))
        return
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
