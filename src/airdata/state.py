"""Where a training loop stands in its data: plain values, and the arithmetic that turns deliveries into a position.

    Start ──► workers read from there ──► Report with each batch ──► Received ──► State ──► a checkpoint

A position is one integer as long as every delivered sample came from one file, in order: then what was received is
exactly the beginning of the epoch's order, and any other topology can go on from it. A wrapper that drops samples or
makes several from one file breaks that, and the position becomes that of each worker, which only the same topology can
take up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from airdata.errors import StateError
from airdata.order import UNEVEN, Schedule, Uneven

__all__ = ["Place", "Received", "Report", "Start", "State"]

VERSION = 1


class Place(NamedTuple):
    """Where one worker's source stands.

    Attributes:
        epoch: of the source; a wrapper may start its source more than once.
        passed: samples the source has handed out in this epoch, of those that are this worker's to read.
        drop: samples that the wrapper has already made of the next file, to be left out when it is read again.
    """

    epoch: int
    passed: int = 0
    drop: int = 0


class Report(NamedTuple):
    """What travels with a batch: the role of the worker that made it, and where its source then stood."""

    role: int
    place: Place


@dataclass(frozen=True)
class Start:
    """What the readers of one iteration must know: the same value in every worker of a rank.

    Attributes:
        epoch: its number.
        base: samples of it that were served before.
        rank: of this process.
        world_size: ranks.
        local_world_size: ranks of this node, who share the budget of prefetching.
        batch_size: samples of a rank's batch.
        uneven: see :class:`airdata.order.Schedule`.
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
    turn: int
    places: tuple[Place, ...]

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
        return Schedule(samples, base, self.world_size, self.batch_size, self.uneven)

    def pack(self) -> list[int]:
        """As numbers, to lie in memory that workers share; always of the same length for the same number of workers."""
        head = [self.epoch, self.base, self.rank, self.world_size, self.local_world_size, self.batch_size]
        return [*head, UNEVEN.index(self.uneven), self.keep, self.turn, *(number for p in self.places for number in p)]

    @staticmethod
    def unpack(numbers: Sequence[int]) -> Start:
        """The inverse of :meth:`pack`."""
        epoch, base, rank, world_size, local_world_size, batch_size, uneven, keep, turn, *rest = map(int, numbers)
        places = tuple(Place(*rest[at : at + 3]) for at in range(0, len(rest), 3))
        return Start(epoch, base, rank, world_size, local_world_size, batch_size, UNEVEN[uneven], keep, turn, places)


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
        version: of this form.
    """

    seed: int
    shuffle: int
    epoch: int
    samples_served: int
    n: int
    manifest: str
    source: str = ""
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
            return State(**numbers, manifest=str(values["manifest"]), source=str(values.get("source", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a data position: {error!r} in {dict(values)!r}") from error


def pack_source(start: Start, places: Sequence[Place], turn: int) -> str:
    """The places of a rank's workers, with the topology they belong to."""
    topology = _topology(start.rank, start.world_size, start.workers, start.batch_size)
    return json.dumps({**topology, "base": start.base, "turn": turn, "places": [list(place) for place in places]})


def resume_source(source: str, start: Start) -> Start:
    """The start that takes up the places saved in ``source``.

    Raises:
        StateError: they belong to another rank, or another topology.
    """
    saved = json.loads(source)
    here = _topology(start.rank, start.world_size, start.workers, start.batch_size)
    differs = [f"{name} was {saved[name]} and is {value}" for name, value in here.items() if saved[name] != value]
    if differs:
        raise StateError(
            "this position was saved behind a wrapper that drops samples or makes several from one file, so it is that "
            "of each worker, and only the same rank of the same topology can take it up, but "
            + "; ".join(differs)
            + ". Save it per rank, under a key with the rank in it, and resume on the same topology; or set "
            "state['source'] = '' to go on from about the same place, with some samples repeated or left out."
        )
    places = tuple(Place(*place) for place in saved["places"])
    return replace(start, base=int(saved["base"]), turn=int(saved["turn"]), places=places)


def _topology(rank: int, world_size: int, workers: int, batch_size: int) -> dict[str, int]:
    return {"rank": rank, "world_size": world_size, "workers": workers, "batch_size": batch_size}


@dataclass
class Received:
    """What a training loop has received of one iteration.

    Attributes:
        start: of the iteration.
        samples: of an epoch.
        places: of each role, after the last batch received from it.
        batches: received of each role.
        last: the role whose batch came last; -1 before the first.
    """

    start: Start
    samples: int
    places: list[Place] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    last: int = -1

    def __post_init__(self) -> None:
        self.places = list(self.start.places)
        self.batches = [0] * self.start.workers

    def add(self, report: Report) -> None:
        """One more batch has reached the training loop."""
        self.places[report.role] = report.place
        self.batches[report.role] += 1
        self.last = report.role

    def position(self) -> tuple[int, str]:
        """``samples_served`` and ``source`` of a state."""
        start, workers = self.start, self.start.workers
        schedule = start.schedule(self.samples)
        if not any(self.batches) and start.places == _fresh(start):
            return start.base, ""
        in_turn = [len(range(role, sum(self.batches), workers)) for role in range(workers)]
        as_dealt = [
            Place(start.epoch, schedule.length(start.rank, role, workers, count)) for role, count in enumerate(in_turn)
        ]
        if self.batches == in_turn and self.places == as_dealt and start.places == _fresh(start):
            return schedule.served(sum(self.batches)), ""
        # The first step that some worker has not fully passed: nothing before it can still come.
        whole = min(
            place.passed // start.batch_size * workers + role if place.epoch == start.epoch else schedule.steps
            for role, place in enumerate(self.places)
        )
        turn = start.turn if self.last < 0 else (self.last + 1) % workers
        return schedule.served(whole), pack_source(start, self.places, turn)


def _fresh(start: Start) -> tuple[Place, ...]:
    return (Place(start.epoch),) * start.workers
