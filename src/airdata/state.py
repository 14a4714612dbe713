"""Where a training loop stands in its data: plain values, and how they are written down.

    Start ──► workers read from there ──► Report with each batch ──► Received (received.py) ──► State ──► a checkpoint

A position is one integer as long as every delivered sample came from one file, in order: then what was received is
exactly the beginning of the epoch's order, and any other topology can go on from it. A wrapper that drops samples,
makes several from one file or goes from one source to the next breaks that, and the position becomes that of each
worker, which only the same topology can take up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from airdata.errors import StateError
from airdata.schedule import UNEVEN, Schedule, Uneven

__all__ = ["Checkpointable", "Place", "Report", "Start", "State", "pack_source", "resume_source"]

VERSION = 1


@runtime_checkable
class Checkpointable(Protocol):
    """An object whose position can be saved and restored; what DCP and torchdata call stateful."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved position."""
        ...


class Place(NamedTuple):
    """Where one worker's source stands.

    Attributes:
        epoch: of the source; a wrapper may start its source more than once.
        passed: samples the source has handed out in this epoch, of those that are this worker's to read.
        drop: samples that the wrapper has already made of what it reads next, to be left out when that is read again.
    """

    epoch: int
    passed: int = 0
    drop: int = 0


class Report(NamedTuple):
    """What travels with a batch: the role of the worker that made it, and where each of its sources then stood."""

    role: int
    places: Sequence[Place]


@dataclass(frozen=True)
class Start:
    """What the readers of one iteration of a source must know: the same value in every worker of a rank.

    Attributes:
        epoch: its number.
        base: samples of it that were served before.
        rank: of this process.
        world_size: ranks.
        local_world_size: ranks of this node, who share the budget of prefetching.
        batch_size: samples of a rank's batch.
        uneven: see :class:`airdata.schedule.Schedule`.
        nodes: likewise.
        groups: of files; see :class:`airdata.order.EpochOrder`.
        keep: how many of its latest files a worker keeps readable.
        turn: the role that worker 0 plays; worker ``w`` plays role ``turn + w``, modulo the workers.
        places: of each role; one per worker, at least one.
    """

    epoch: int
    base: int
    rank: int
    world_size: int
    local_world_size: int
    batch_size: int
    uneven: Uneven
    keep: int
    places: tuple[Place, ...]
    turn: int = 0
    nodes: int = 1
    groups: int = 1

    @property
    def workers(self) -> int:
        """Readers of this rank."""
        return len(self.places)

    def role(self, worker: int) -> int:
        """The part of the work that a worker takes up."""
        return (worker + self.turn) % self.workers

    def schedule(self, samples: int, epoch: int | None = None) -> Schedule:
        """Who reads what in this epoch, or in a whole later one."""
        base = self.base if epoch is None or epoch == self.epoch else 0
        return Schedule(samples, base, self.world_size, self.batch_size, self.uneven, self.nodes)

    def pack(self) -> list[int]:
        """As numbers, to lie in memory that workers share; always of the same length for the same number of workers."""
        head = [self.epoch, self.base, self.rank, self.world_size, self.local_world_size, self.batch_size]
        more = [UNEVEN.index(self.uneven), self.keep, self.turn, self.nodes, self.groups]
        return [*head, *more, *(number for place in self.places for number in place)]

    @staticmethod
    def unpack(numbers: Sequence[int]) -> Start:
        """The inverse of :meth:`pack`."""
        epoch, base, rank, world_size, local_world_size, batch_size, uneven, keep, *more = map(int, numbers)
        turn, nodes, groups, *rest = more
        places = tuple(Place(*rest[at : at + 3]) for at in range(0, len(rest), 3))
        head = (epoch, base, rank, world_size, local_world_size, batch_size)
        return Start(*head, UNEVEN[uneven], keep, places, turn, nodes, groups)


@dataclass(frozen=True)
class State:
    """A saved position: what ``state_dict`` returns, as a value. Plain ints and strings, so any format can hold it.

    Attributes:
        seed: of the shuffle.
        shuffle: 1 or 0.
        epoch: its number.
        samples_served: of the epoch, by all ranks together.
        n: samples of an epoch.
        manifest: its fingerprint.
        source: "" when ``samples_served`` says it all, and otherwise the places of this rank's workers, as JSON.
        groups: that the files were dealt to; 1 when every rank may read every file.
        shares: samples of each source in an epoch, as ``"300+100"``; "" when sources are not weighted.
        version: of this form.
    """

    seed: int
    shuffle: int
    epoch: int
    samples_served: int
    n: int
    manifest: str
    source: str = ""
    groups: int = 1
    shares: str = ""
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """As ``state_dict`` returns it."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> State:
        """Read what :meth:`to_dict` gave.

        Raises:
            StateError: it is of another version, or something else altogether.
        """
        version = values.get("version")
        if version != VERSION:
            raise StateError(f"a data position of version {version!r} cannot be read; this release writes {VERSION}")
        try:
            numbers = {name: int(values[name]) for name in ("seed", "shuffle", "epoch", "samples_served", "n")}
            return State(
                **numbers,
                manifest=str(values["manifest"]),
                source=str(values.get("source", "")),
                groups=int(values.get("groups", 1)),
                shares=str(values.get("shares", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a data position: {error!r} in {dict(values)!r}") from error


def pack_source(start: Start, places: Sequence[Place], turn: int, worker: int | None = None) -> str:
    """The places of a rank's workers, with the topology they belong to.

    Args:
        start: of the iteration.
        places: of each role.
        turn: the role whose batch comes next.
        worker: when only the place of this worker is known, since it is the worker itself that asks.
    """
    saved = {"base": start.base, "turn": turn, "places": [list(place) for place in places]}
    return json.dumps({**_topology(start), **({} if worker is None else {"worker": worker}), **saved})


def resume_source(source: str, start: Start, worker: int | None = None) -> Start:
    """The start that takes up the places saved in ``source``.

    Raises:
        StateError: they belong to another rank, worker or topology.
    """
    saved = json.loads(source)
    here = {**_topology(start), **({} if worker is None and "worker" not in saved else {"worker": worker})}
    differs = [
        f"{name} was {saved.get(name)} and is {value}" for name, value in here.items() if saved.get(name) != value
    ]
    if differs:
        raise StateError(
            "this position was saved by a loader worker, or behind a wrapper that drops samples, makes several from "
            "one file or reads several datasets one after the other. So it is that of each worker, and only the same "
            "rank of the same topology can take it up, but "
            + "; ".join(differs)
            + ". Save it per rank, under a key with the rank in it, and resume on the same topology; or set "
            "state['source'] = '' to go on from about the same place, with some samples repeated or left out."
        )
    places = tuple(Place(*place) for place in saved["places"])
    return replace(start, base=int(saved["base"]), turn=int(saved["turn"]), places=places)


def _topology(start: Start) -> dict[str, int]:
    names = ("rank", "world_size", "workers", "batch_size", "nodes")
    return {name: getattr(start, name) for name in names if name != "nodes" or start.nodes > 1}
