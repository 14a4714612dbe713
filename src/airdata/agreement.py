"""Ranks compare what they are about to read, before the first sample.

    every rank: store["…/<dataset>/<turn>/<rank>"] = its facts
    rank 0:     waits for all, compares ──► store["…/verdict"] ──► every rank goes on, or raises the same error

It goes through the process group's key-value store: no collective, so no GPU and no NCCL time-out is touched.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from airdata.errors import TopologyError

__all__ = ["agree", "compare"]

# As long as a first step may take: the slowest rank may still be listing, or evaluating after the last epoch.
TIMEOUT = 600.0
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
_names = itertools.count()

Facts = Mapping[str, "int | str"]


class Agreement:
    """The comparisons of one dataset. Ranks must iterate their datasets in the same order."""

    def __init__(self) -> None:
        self._name: int | None = None
        self._turn = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement, ()

    def check(self, facts: Facts, timeout: float | None = None) -> None:
        """Compare with all ranks of the default process group; nothing without one.

        Raises:
            TopologyError: ranks differ, or some did not begin to iterate in time; names both sides.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        if self._name is None:
            self._name = next(_names)
        prefix = f"airdata/agreement/{self._name}/"
        rank, world_size = dist.get_rank(), dist.get_world_size()
        agree(_store(), facts, prefix=prefix, turn=self._turn, rank=rank, world_size=world_size, timeout=timeout)
        self._turn += 1


def _store() -> c10d.Store:
    return c10d._get_default_store()  # noqa: SLF001 - there is no public way to a group's store


def agree(
    store: c10d.Store,
    facts: Facts,
    *,
    prefix: str,
    turn: int,
    rank: int,
    world_size: int,
    timeout: float | None = None,
) -> None:
    """Compare ``facts`` among ranks through a store.

    Args:
        store: all ranks' key-value store.
        facts: what must be the same everywhere.
        prefix: of the keys.
        turn: how often this has been done before under this prefix.
        rank: of this process.
        world_size: ranks that take part.
        timeout: seconds to wait for the others.

    Raises:
        TopologyError: see :meth:`Agreement.check`.
    """
    deadline = time.monotonic() + (TIMEOUT if timeout is None else timeout)
    keys = [f"{prefix}{turn}/{peer}" for peer in range(world_size)]
    verdict_key = f"{prefix}{turn}/verdict"
    store.set(keys[rank], json.dumps(dict(facts)))
    if rank == 0:
        missing = _wait(store, keys, deadline)
        if missing:
            verdict = (
                f"ranks {_few(missing)} did not begin to iterate their dataset in time, while rank 0 did. Every rank "
                "must iterate the same datasets in the same order; give rank= and world_size= to a dataset that only "
                "some ranks read."
            )
        else:
            verdict = compare([json.loads(store.get(key)) for key in keys])
        store.set(verdict_key, verdict)
        if turn and not missing:  # everyone has read the last verdict, or would not be here
            for key in (*(f"{prefix}{turn - 1}/{peer}" for peer in range(world_size)), f"{prefix}{turn - 1}/verdict"):
                store.delete_key(key)
    else:
        # Rank 0 waits as long for the slowest of us, so its verdict may come a little later than that.
        if _wait(store, [verdict_key], deadline + 5):
            raise TopologyError(
                f"rank {rank} waited for rank 0 to begin to iterate its dataset, and it did not. Every rank must "
                "iterate the same datasets in the same order; give rank= and world_size= to a dataset that only some "
                "ranks read."
            )
        verdict = store.get(verdict_key).decode()
    if verdict:
        raise TopologyError(verdict)


def compare(facts: Sequence[Facts]) -> str:
    """What ranks disagree on, in words; "" when they agree. ``facts`` are by rank."""
    lines = []
    for name in facts[0]:
        ranks: dict[int | str | None, list[int]] = {}
        for rank, theirs in enumerate(facts):
            ranks.setdefault(theirs.get(name), []).append(rank)
        if len(ranks) > 1:
            sides = " and ".join(f"{value!r} on rank {_few(some)}" for value, some in ranks.items())
            lines.append(f"{name} is {sides}")
    if not lines:
        return ""
    return (
        f"ranks are about to read different data: {'; '.join(lines)}. "
        "Samples would be repeated or left out, so nothing was read. Give every rank the same."
    )


def _few(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"{shown} and {len(ranks) - most} more" if len(ranks) > most else shown


def _wait(store: c10d.Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Wait until all keys are set; the numbers of those that were not in time.

    By asking, not by ``store.wait``: that holds the client's lock, so NCCL's heartbeat through the same store would
    wait with us, and Ctrl-C would not be heard.
    """
    pause, left = _FIRST_PAUSE, list(range(len(keys)))
    while True:
        if store.check([keys[number] for number in left]):
            return []
        left = [number for number in left if not store.check([keys[number]])]
        if not left:
            return []
        if time.monotonic() > deadline:
            return left
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
