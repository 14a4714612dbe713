"""Who am I: the rank facts of this process, as integers.

The process's own environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, ..., as torchrun and this package set them) is
trusted first, then a process group that the process has initialised, and a plain single process is rank 0 of 1. A fact
that cannot be known is an error, never a guess: a wrong 0 puts every rank on the same GPU or gives every rank the same
data. The meaning of the functions follows the `dist` helpers of MosaicML Composer. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = [
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_replica_rank",
    "get_world_size",
]


def get_global_rank(group: Any = None) -> int:
    """Rank of this process among all, 0 to `get_world_size() - 1`.

    Args:
        group: A `torch.distributed.ProcessGroup`; the answer is then the rank in that group, or -1 outside of it.

    Raises:
        RuntimeError: Exactly one of `RANK` and `WORLD_SIZE` is set, they contradict each other, or `group` is given and
            `torch.distributed` is not initialised.
    """
    if group is not None:
        dist = _initialized_distributed()
        if dist is None:
            raise RuntimeError("get_global_rank(group=...) needs torch.distributed.init_process_group() first.")
        return int(dist.get_rank(group))
    return _world()[0]


def get_world_size() -> int:
    """Number of processes of the whole job, on all nodes.

    Raises:
        RuntimeError: Exactly one of `RANK` and `WORLD_SIZE` is set, or they contradict each other.
    """
    return _world()[1]


def get_local_rank() -> int:
    """Rank of this process on its node, 0 to `get_local_world_size() - 1`; also the index of its accelerator.

    Raises:
        RuntimeError: There is more than one process, and `LOCAL_RANK` is not set.
    """
    return _local_fact("LOCAL_RANK", alone=0)


def get_local_world_size() -> int:
    """Number of processes of the job on this node.

    Raises:
        RuntimeError: There is more than one process, and `LOCAL_WORLD_SIZE` is not set.
    """
    return _local_fact("LOCAL_WORLD_SIZE", alone=1)


def get_node_rank() -> int:
    """Number of this node in the job, from 0. torchrun's name for it, `GROUP_RANK`, is read too.

    Raises:
        RuntimeError: There is more than one node, and neither `NODE_RANK` nor `GROUP_RANK` is set.
    """
    for name in ("NODE_RANK", "GROUP_RANK"):
        value = _from_environment(name)
        if value is not None:
            return value
    # All processes on this node: it is the only one.
    if get_world_size() in {1, _from_environment("LOCAL_WORLD_SIZE")}:
        return 0
    raise RuntimeError(_missing("NODE_RANK (or GROUP_RANK)"))


def get_replica_rank() -> int:
    """Number of the model replica that this process belongs to, from 0.

    This is the global rank: with data parallelism every process is a replica. A replica that is spread over several
    processes (tensor or pipeline parallelism, hybrid sharding) is known to the `DeviceMesh` alone; ask it,
    `mesh.get_local_rank(<name of the replicated dimension>)`.

    Raises:
        RuntimeError: As for `get_global_rank`.
    """
    return get_global_rank()


def _world() -> tuple[int, int]:
    """(rank, world size)."""
    rank, size = _from_environment("RANK"), _from_environment("WORLD_SIZE")
    if (rank is None) != (size is None):
        present, absent = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        # A child of a rank that inherits one of the two would wait for ever for peers, or read everybody's data.
        raise RuntimeError(
            f"{present}={os.environ[present]} is set and {absent} is not: set both, or unset {present} to run alone."
        )
    if rank is not None and size is not None:
        if rank >= size:
            raise RuntimeError(f"RANK={rank} and WORLD_SIZE={size} contradict each other: ranks end at {size - 1}.")
        return rank, size
    dist = _initialized_distributed()
    return (0, 1) if dist is None else (int(dist.get_rank()), int(dist.get_world_size()))


def _local_fact(name: str, *, alone: int) -> int:
    value = _from_environment(name)
    if value is not None:
        return value
    if get_world_size() == 1:
        return alone
    raise RuntimeError(_missing(name))


def _missing(name: str) -> str:
    return (
        f"This process is rank {get_global_rank()} of {get_world_size()}, and {name} is not set, so that its place on "
        "the node is unknown. Start ranks with airdist or torchrun, or set the variable."
    )


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise RuntimeError(f"{name}={text!r} in the environment is not a number of a rank or a size.")
    return value


def _initialized_distributed() -> Any:
    """The module `torch.distributed` if this process has imported it and initialised a group, else None."""
    dist = sys.modules.get("torch.distributed")
    # A build without distributed support, or another thread's unfinished import, lacks the function.
    is_initialized = getattr(dist, "is_initialized", None)
    return dist if is_initialized is not None and is_initialized() else None
