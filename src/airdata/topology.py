"""Rank, world size, node and worker: who this process is.

Facts are read when iteration starts, never at construction: explicit arguments first, then an initialised
``torch.distributed``, then the process's environment, so that torchrun, airdist, Accelerate, Lightning and plain Python
all agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.utils.data import get_worker_info

from airdata.errors import TopologyError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The place of one process in the job.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: ranks in the job.
        local_rank: rank on its node.
        local_world_size: ranks on this node.
        worker: index of the loader worker in its rank, 0 without workers.
        workers: loader workers of this rank; 1 when the main process reads for itself.
        nodes: that the ranks lie on, equally many in a row on each; 0 when they lie otherwise.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    worker: int = 0
    workers: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        pairs = (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
            ("worker", self.worker, "workers", self.workers),
        )
        for name, value, limit_name, limit in pairs:
            if not 0 <= value < limit:
                raise TopologyError(f"{name}={value} must be at least 0 and less than {limit_name}={limit}")

    @staticmethod
    def current(
        rank: int | None = None,
        world_size: int | None = None,
        nodes: int | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Topology:
        """The topology of this process, now.

        Args:
            rank: overrides what would be found; needs ``world_size`` too.
            world_size: overrides what would be found; needs ``rank`` too.
            nodes: overrides what would be found.
            environ: stands in for ``os.environ``.

        Raises:
            TopologyError: only one of rank and world size is known (a program that inherits just one of them would
                train on the wrong share of the data or wait for ever), a value is no number in its range, or ``nodes``
                does not divide the ranks.
        """
        environ = os.environ if environ is None else environ
        if (rank is None) != (world_size is None):
            raise TopologyError(f"rank={rank} and world_size={world_size}: give both or neither")
        given = rank is not None
        if rank is None or world_size is None:
            if dist.is_available() and dist.is_initialized():
                rank, world_size = dist.get_rank(), dist.get_world_size()
            else:
                rank, world_size = _pair(environ, "RANK", "WORLD_SIZE")
        local_rank = _number(environ, "LOCAL_RANK")
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE")
        if local_rank is None or local_world_size is None:
            # A launcher that names no node: every rank is taken for a node of its own.
            local_rank, local_world_size = 0, 1
        if nodes is None:
            # Ranks that a user numbers (data-parallel ones, say) lie in the same order as those of the launcher.
            ranks = _number(environ, "WORLD_SIZE") if given else world_size
            nodes = _nodes(environ, rank, world_size, (ranks or world_size) / local_world_size, check_node=not given)
        elif nodes < 1 or world_size % nodes:
            raise TopologyError(f"nodes={nodes} cannot have equally many of {world_size} ranks each")
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        return Topology(rank, world_size, local_rank, local_world_size, worker, workers, nodes)

    def even_nodes(self) -> int:
        """How many nodes there are, for those who give each node data of its own.

        Raises:
            TopologyError: the ranks of a node do not stand in a row, or there are more on some nodes than on others.
        """
        if not self.nodes:
            raise TopologyError(
                f"rank {self.rank} of {self.world_size}, with {self.local_world_size} ranks on its node: the nodes do "
                "not have equally many ranks, one node's after the other's, so files cannot belong to nodes. Start "
                'as many ranks on each node, numbered node by node, or use shuffle_scope="global".'
            )
        return self.nodes


def _nodes(environ: Mapping[str, str], rank: int, world_size: int, nodes: float, *, check_node: bool) -> int:
    """How many nodes the ranks lie on if evenly and in a row, else 0."""
    if nodes != int(nodes) or world_size % int(nodes):
        return 0
    node = _number(environ, "GROUP_RANK")
    node = _number(environ, "NODE_RANK") if node is None else node
    expected = rank // (world_size // int(nodes))
    return int(nodes) if node is None or node == expected or not check_node else 0


def _pair(environ: Mapping[str, str], first: str, second: str) -> tuple[int, int]:
    rank, world_size = _number(environ, first), _number(environ, second)
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None:
        here, missing = (first, second) if world_size is None else (second, first)
        raise TopologyError(
            f"{here}={environ[here]} is set and {missing} is not. Set both (a launcher such as airdist or torchrun "
            f"does), or unset {here} to run as a single process."
        )
    return rank, world_size


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError:
        raise TopologyError(f"{name}={value!r} is not a whole number") from None
