"""What a loader reads from: files, shared out among ranks and workers.

    process that trains: plan ──► Start (topology, agreement, position) ──► workers
    worker:              begin ──► iter ──► files of this worker's part

Rank and worker are read when iteration starts. The process that trains keeps the position; workers only report theirs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from airdata.agreement import Agreement
from airdata.errors import StateError
from airdata.files import Files
from airdata.metrics import Counters
from airdata.position import Position, is_spawning
from airdata.reading import Reader, Reading
from airdata.received import Received
from airdata.schedule import Schedule, Uneven
from airdata.state import Place, Report, Start, State, pack_source, resume_source
from airdata.topology import Topology

__all__ = ["Scope", "Sharing", "Source"]

_log = logging.getLogger(__name__)

Scope = Literal["global", "group"]

# Paths stay readable this many samples when no loader of ours says how far its consumer may lag behind.
_KEPT_UNTOLD = 1024


@dataclass(frozen=True)
class Sharing:
    """How the samples are shared out; see :class:`airdata.UCVolumeDataset`."""

    uneven: Uneven
    scope: Scope
    groups: int | None
    rank: int | None
    world_size: int | None
    nodes: int | None

    @property
    def found(self) -> bool:
        """Whether this process's rank is found, and not given."""
        return self.rank is None and self.world_size is None


class Source(IterableDataset[Any]):
    """Files that ranks and workers read, each its own part of one order.

    Attributes:
        files: what is read.
        batch_size: of the loader that reads from here, told by it.
    """

    def __init__(self, files: Files, reading: Reading, sharing: Sharing) -> None:
        super().__init__()
        self.files = files
        self.batch_size = 1
        self._sharing = sharing
        self._parent: tuple[int, int, int | None] | None = None  # topology of the process that spawned this one
        self._position = Position()
        self._agreement = Agreement()
        self._reading = reading
        self._reader = Reader(files, reading)
        self._next: tuple[Start, int, object] | None = None
        self._inside: tuple[Start, int, object] | None = None
        self._own: tuple[Start, int] | None = None  # in a worker of a loader that knows nothing of us
        self._loaded: State | None = None  # there, until its next iteration

    # --- in the process that trains ---

    def plan(
        self, *, batch_size: int = 1, drop_last: bool = False, workers: int = 1, keep: int = _KEPT_UNTOLD
    ) -> Start:
        """Begin an iteration in the process that trains: read the topology, compare with other ranks, take a position.

        Args:
            batch_size: samples of a rank's batch.
            drop_last: whether the loader drops batches that are not full.
            workers: readers of this rank, at least one.
            keep: how many of its latest paths each keeps readable.

        Raises:
            TopologyError: ranks disagree, or their facts contradict each other.
            StateError: the position was saved on another topology and cannot be taken up here.
        """
        base, source = self._position.next_start()
        start = self._start(self._position.epoch, base, workers, batch_size=batch_size, drop_last=drop_last, keep=keep)
        if source:
            start = resume_source(source, start)
        if self._sharing.found:
            self._agreement.check(self._facts(start, behind_wrapper=bool(source)))
        schedule = start.schedule(len(self.files))
        if start.rank == 0:
            if schedule.trouble:
                warnings.warn(schedule.trouble, stacklevel=3)
            if start.groups % start.nodes:
                _log.warning(
                    "the files are dealt to %d groups, which %d nodes cannot share out among them, so a file may be "
                    "read on one node in this epoch and on another in the next; every sample is still read once",
                    start.groups,
                    start.nodes,
                )
        self._position.begin()
        self._position.groups = start.groups
        return start

    def _start(
        self,
        epoch: int,
        base: int = 0,
        workers: int = 1,
        *,
        batch_size: int = 1,
        drop_last: bool = False,
        keep: int = _KEPT_UNTOLD,
    ) -> Start:
        """An iteration of an epoch, of which ``base`` samples were served; see :meth:`plan`."""
        topology = self.topology()
        uneven: Uneven = "drop" if drop_last and self._sharing.uneven == "keep" else self._sharing.uneven
        nodes = topology.even_nodes() if self._sharing.scope == "group" else 1
        places = (Place(epoch),) * workers
        head = (epoch, base, topology.rank, topology.world_size, topology.local_world_size, batch_size)
        return Start(*head, uneven, keep, places, nodes=nodes, groups=self._groups(nodes))

    def _groups(self, nodes: int | None = None) -> int:
        """Into how many groups the files are dealt: once for all, by the nodes of the first run."""
        if self._sharing.scope == "global":
            return 1
        return self._sharing.groups or self._position.groups or nodes or self.topology().even_nodes()

    def _shares(self) -> str:
        return "+".join(map(str, self.files.shares or ()))

    def _facts(self, start: Start, *, behind_wrapper: bool) -> dict[str, int | str]:
        """What all ranks must have in common."""
        return {
            "the manifest": self.files.fingerprint,
            "the number of files": len(self.files),
            "seed": self._reading.seed,
            "shuffle": self._reading.shuffle,
            "shuffle_scope": self._sharing.scope,
            "groups": start.groups,
            "nodes": start.nodes,
            "samples of each source": self._shares(),
            "epoch": start.epoch,
            "samples_served": start.base,
            "num_workers": start.workers,
            "batch_size": start.batch_size,
            "uneven": start.uneven,
            "resuming behind a wrapper": behind_wrapper,
        }

    def follow(self, where: Callable[[], tuple[int, str]]) -> None:
        """Ask ``where`` for samples served and source, until this iteration is over."""
        self._position.follow(where)

    def finished(self, epoch: int) -> None:
        """The training loop has reached the end of an epoch."""
        self._position.finish(epoch)

    def topology(self) -> Topology:
        """Rank and worker of this process, now."""
        if get_worker_info() is not None and self._parent is not None:
            return Topology.current(*self._parent)
        sharing = self._sharing
        return Topology.current(sharing.rank, sharing.world_size, sharing.nodes)

    def schedule(self, batch_size: int | None = None, *, drop_last: bool = False) -> tuple[Schedule, int]:
        """Who reads what in a whole epoch, and which rank this is."""
        start = self._start(0, batch_size=batch_size or self.batch_size, drop_last=drop_last)
        return start.schedule(len(self.files)), start.rank

    # --- where it is read ---

    def begin(self, start: Start, role: int, owner: object) -> None:
        """The next ``iter()`` in this process reads the part ``role`` of ``start``."""
        self._next, self._inside = (start, role, owner), None
        self._reader.place = start.places[role]._replace(drop=0)  # what to drop is the wrapper's business

    def end(self, owner: object) -> None:
        """An iteration that :meth:`begin` prepared for ``owner`` is over."""
        if self._inside is not None and self._inside[2] is owner:
            self._inside = None

    @property
    def place(self) -> Place:
        """Where the reader in this process stands."""
        return self._reader.place

    @property
    def counters(self) -> Counters:
        """What was read by this process, and by workers that report to it."""
        return self._reader.counters

    def check_bad_files(self, count: int) -> None:
        """Raise BadFilesError when all workers of this rank together have met more bad files than allowed."""
        self._reader.check_bad_files(count)

    def __iter__(self) -> Iterator[Any]:
        if self._next is not None:
            self._inside, self._next = self._next, None
            start, role, _ = self._inside
            return self._read(start, role, start.places[role])
        if self._inside is not None:  # a wrapper that starts its source again within one iteration
            start, role, _ = self._inside
            return self._read(start, role, Place(self.place.epoch + 1))
        info = get_worker_info()
        if info is None:
            return self._read_for_itself(self.plan())
        epoch, base = self._position.begin_in_worker(info.id)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            epoch, base = loaded.epoch, loaded.samples_served
        start = self._start(epoch, base, info.num_workers)
        if loaded is not None and loaded.source:
            start = resume_source(loaded.source, start, info.id)
        self._own = start, info.id
        return self._read(start, info.id, start.places[info.id])

    def _read(self, start: Start, role: int, place: Place) -> Iterator[Any]:
        self._reader.place = place = place._replace(drop=0)
        return self._reader.read(start, role, place)

    def _read_for_itself(self, start: Start) -> Iterator[Any]:
        received = Received([start], [len(self.files)])
        self._position.follow(received.position)
        for sample in self._read(start, 0, start.places[0]):
            received.add(Report(0, (self.place,)))
            yield sample
        self._position.finish(start.epoch)

    # --- position ---

    def _state(self) -> State:
        served, source = self._position.where()
        epoch = self._position.epoch
        if get_worker_info() is not None:
            # A loader that knows nothing of us, such as torchdata's, asks each worker where it stands.
            if self._loaded is not None:
                return self._loaded
            if self._own is not None:
                start, worker = self._own
                places = [self.place if role == worker else place for role, place in enumerate(start.places)]
                epoch, served, source = start.epoch, start.base, pack_source(start, places, 0, worker)
        elif self._position.read_by_workers:
            raise StateError(
                "the position is not known here: this dataset was read by workers of a loader that does not report "
                "what the training loop received. Use airdata.DataLoader and save its state, or num_workers=0."
            )
        return self._state_at(epoch, served, source)

    def _state_at(self, epoch: int, served: int, source: str) -> State:
        n, manifest, shares = len(self.files), self.files.fingerprint, self._shares()
        seed, shuffle = self._reading.seed, int(self._reading.shuffle)
        return State(seed, shuffle, epoch, served, n, manifest, source, self._groups(), shares)

    def _differences(self, state: State) -> list[str]:
        """In words, why a position is not one in this dataset."""
        mine = self._state_at(0, 0, "")
        facts = {
            "n (the number of files)": (state.n, mine.n),
            "seed": (state.seed, mine.seed),
            "shuffle": (bool(state.shuffle), bool(mine.shuffle)),
            "groups": (state.groups, mine.groups),
            "samples of each source": (state.shares, mine.shares),
        }
        if self._sharing.scope == "group" and self._sharing.groups is None:
            del facts["groups"]  # it comes with the state
        differs = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in facts.items() if was != now]
        changed = self.files.difference(state.manifest)
        return [*differs, changed] if changed else differs

    def _load(self, state: State) -> None:
        if self._sharing.scope == "group":
            self._position.groups = state.groups
        if get_worker_info() is None:
            self._position.load(state.epoch, state.samples_served, state.source)
        else:
            self._loaded = state

    def __getstate__(self) -> dict[str, Any]:
        values = {**self.__dict__, "_next": None, "_inside": None, "_own": None, "_loaded": None}
        if is_spawning():
            # A spawned worker has neither the process group nor, perhaps, the environment that told us.
            topology = self.topology()
            values["_parent"] = (topology.rank, topology.world_size, topology.nodes or None)
        return values
