"""UCVolumeDataset: the files of a volume as samples.

    volume ──► manifest ──► order of the epoch ──► this worker's share ──► prefetch ──► cache ──► path, bytes or file

Rank and worker are read when iteration starts. The process that trains keeps the position; workers only report theirs.
(Longer than our files are, since the arguments of the interface are explained here and nowhere else.)
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from torch.utils.data import IterableDataset, get_worker_info

from airdata.agreement import Agreement
from airdata.cache import VolumeCache
from airdata.errors import StateError
from airdata.files import Files, VolumeFile, Yields, check_choice, choose_cache, load_manifests
from airdata.manifest import Manifest
from airdata.manifest.patterns import Pattern, Selection
from airdata.metrics import Counters
from airdata.order import UNEVEN, Schedule, Uneven
from airdata.position import Position, is_spawning
from airdata.reading import OnError, Reader, Reading
from airdata.state import Place, Received, Report, Start, State, resume_source
from airdata.topology import Topology
from airdata.volume import Volume

__all__ = ["UCVolumeDataset", "VolumeFile"]

_log = logging.getLogger(__name__)

# Paths stay readable this many samples when no loader of ours says how far its consumer may lag behind.
_KEPT_UNTOLD = 1024


class UCVolumeDataset(IterableDataset[Any]):
    """The files of a volume, copied to local disk when first read.

    Yields ``str`` paths on local disk whose tail is the file's path in the volume, so a folder name can be a label.
    Wrap it in another ``IterableDataset`` to decode, and read it through :class:`airdata.DataLoader`.

    Args:
        path: a volume directory or URL, or a list of them, which are read as one.
        pattern: a glob such as ``"**/*.jpg"``, a list of globs, or a predicate on the path in the volume.
        recursive: whether folders inside folders are searched.
        shuffle: whether each epoch has an order of its own.
        seed: of the shuffle.
        shuffle_scope: ``"global"``; ``"group"`` is not available yet.
        uneven: what becomes of samples that do not fill a step of all ranks: ``"keep"`` reads each exactly once,
            ``"drop"`` leaves them out, ``"pad"`` repeats some; the last two give every rank the same number of equal
            batches.
        on_error: what becomes of a file that cannot be read: ``"raise"``, ``"replace"`` it by another one, which is the
            same on every resume, or ``"skip"`` it (only with ``uneven="keep"``, since ranks will differ).
        max_bad_files: how many files may be replaced or skipped in an epoch, on each rank.
        cache_dir: directory of the cache.
        cache_bytes: its limit, in bytes.
        min_free_bytes: what the cache leaves free on its disk, in bytes.
        cache: a :class:`airdata.VolumeCache` in place of the three above, or False for none.
        prefetch: files fetched ahead, by all processes of a node together.
        prefetch_bytes: their bytes, likewise.
        yields: ``"path"``, ``"bytes"``, or ``"file"`` for a :class:`VolumeFile`.
        storage_options: arguments of the fsspec driver.
        manifest: a :class:`airdata.Manifest` or the path of a saved one, so that nothing is listed; a list for a list
            of paths.
        rank: this process's rank among those who share the data; with ``world_size``. Found by itself when left out.
        world_size: how many processes share the data.

    Raises:
        VolumeError: the path names no volume.
        ValueError: an argument is not one of its choices.
    """

    state_speaks_for_all_ranks = True
    """For checkpoints: any rank's state restores all, or is refused."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Volume | Sequence[str | os.PathLike[str] | Volume],
        *,
        pattern: Pattern = None,
        recursive: bool = True,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_scope: str = "global",
        uneven: Uneven = "keep",
        on_error: OnError = "raise",
        max_bad_files: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        min_free_bytes: int | None = None,
        cache: VolumeCache | bool | None = None,
        prefetch: int = 64,
        prefetch_bytes: int = 512 << 20,
        yields: Yields = "path",
        storage_options: Mapping[str, Any] | None = None,
        manifest: Manifest | str | os.PathLike[str] | Sequence[Manifest | str | os.PathLike[str]] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("uneven", uneven, UNEVEN)
        check_choice("on_error", on_error, get_args(OnError))
        check_choice("yields", yields, get_args(Yields))
        if shuffle_scope == "group":
            raise NotImplementedError('shuffle_scope="group" is not available yet; use "global"')
        check_choice("shuffle_scope", shuffle_scope, ("global",))
        if on_error == "skip" and uneven != "keep":
            raise ValueError(
                f'on_error="skip" gives ranks different numbers of samples, so uneven={uneven!r} cannot hold'
            )
        if prefetch < 1 or prefetch_bytes < 1:
            raise ValueError(f"prefetch={prefetch} and prefetch_bytes={prefetch_bytes} must be positive")
        if rank is not None or world_size is not None:
            Topology.current(rank, world_size)
        paths = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
        if not paths:
            raise ValueError("path=[] names no volume")
        volumes = [Volume.of(one, storage_options) for one in paths]
        kept = choose_cache(cache, cache_dir, cache_bytes, min_free_bytes)
        shared = os.path.join((kept or VolumeCache(cache_dir)).directory, "manifests")
        self.files = Files(
            volumes, Selection(pattern, recursive), load_manifests(manifest, storage_options), kept, shared
        )
        reading = Reading(bool(shuffle), int(seed), on_error, max_bad_files, prefetch, prefetch_bytes, yields)
        self.shuffle, self.seed, self.uneven = reading.shuffle, reading.seed, uneven
        self.batch_size = 1  # of the loader that reads from here, told by it
        self._given = (rank, world_size)
        self._parent: tuple[int, int] | None = None  # rank and world size of the process that spawned this one
        self._position = Position()
        self._agreement = Agreement()
        self._reader = Reader(self.files, reading)
        self._next: tuple[Start, int, object] | None = None
        self._inside: tuple[Start, int, object] | None = None

    # --- what a user calls ---

    @property
    def manifest(self) -> Manifest:
        """The list of files; it is made when first needed.

        Raises:
            EmptyListingError: there is no such file.
            ValueError: there are several volumes; see ``files.manifests``.
        """
        if len(self.files.manifests) > 1:
            raise ValueError(f"this dataset reads {len(self.files.manifests)} volumes: see dataset.files.manifests")
        return self.files.manifests[0]

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read, or comes next."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads. The current one keeps its position, for resumed loops.

        Need not be called: an iteration that reaches its end makes the next epoch current.
        """
        self._position.set_epoch(int(epoch))

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        topology = self.topology()
        return self.schedule(topology.world_size).length(topology.rank)

    def state_dict(self) -> dict[str, Any]:
        """The position: plain ints and strings, the same on every rank.

        Raises:
            StateError: the position is not known here, since another loader's workers read the data.
        """
        error = self._position.state_error()
        if error is not None:
            raise error
        served, source = self._position.where()
        n, manifest = len(self.files), self.files.fingerprint
        return State(self.seed, int(self.shuffle), self.epoch, served, n, manifest, source).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position: the next iteration yields the rest of its epoch, the one after it a whole one.

        Raises:
            StateError: it was saved with other files, another seed or shuffle, or by another version; says what
            differs.
        """
        state = State.from_dict(state_dict)
        differs = [
            f"{name} was {was} and is {now}"
            for name, was, now in (
                ("n (the number of files)", state.n, len(self.files)),
                ("seed", state.seed, self.seed),
                ("shuffle", bool(state.shuffle), self.shuffle),
            )
            if was != now
        ]
        changed = self.files.difference(state.manifest)
        if changed:
            differs.append(changed)
        if differs:
            raise StateError(
                f"this position does not fit the dataset: {'; '.join(differs)}. To go on with the very files it was "
                "saved with, keep a manifest (dataset.manifest.save) and pass it as manifest=."
            )
        if not 0 <= state.samples_served <= state.n:
            raise StateError(f"samples_served={state.samples_served} is not a position among {state.n} samples")
        self._position.load(state.epoch, state.samples_served, state.source)

    def stats(self) -> Counters:
        """What has been read so far, by this process and by the workers that report to it."""
        return self.counters.copy()

    def warm(self, *, progress: bool = True) -> Counters:
        """Fill the cache with this process's share of its node's files, and return what was read.

        Args:
            progress: show a bar.

        Raises:
            FetchError: a file cannot be read.
        """
        return self._reader.warm(Topology.current(*self._given), progress=progress)

    # --- iteration ---

    def __iter__(self) -> Iterator[Any]:
        if self._next is not None:
            self._inside, self._next = self._next, None
            start, role, _ = self._inside
            return self._reader.read(start, role, start.places[role])
        if self._inside is not None:  # a wrapper that starts its source again within one iteration
            start, role, _ = self._inside
            return self._reader.read(start, role, Place(self.place.epoch + 1))
        info = get_worker_info()
        if info is None:
            return self._read_for_itself(self.plan())
        epoch, base = self._position.begin_in_worker(info.id)
        topology = self.topology()
        place = Place(epoch)
        start = Start(
            epoch, base, topology.rank, topology.world_size, topology.local_world_size, 1, self.uneven, _KEPT_UNTOLD, 0,
            (place,) * info.num_workers,
        )  # fmt: skip
        return self._reader.read(start, info.id, place)

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
        topology = self.topology()
        uneven: Uneven = "drop" if drop_last and self.uneven == "keep" else self.uneven
        epoch = self.epoch
        base, source = self._position.next_start()
        start = Start(
            epoch, base, topology.rank, topology.world_size, topology.local_world_size, batch_size, uneven, keep, 0,
            (Place(epoch),) * workers,
        )  # fmt: skip
        if source:
            start = resume_source(source, start)
        if self._given == (None, None):
            facts: dict[str, int | str] = {
                "the manifest": self.files.fingerprint,
                "the number of files": len(self.files),
                "seed": self.seed,
                "shuffle": self.shuffle,
                "epoch": epoch,
                "samples_served": start.base,
                "num_workers": workers,
                "batch_size": batch_size,
                "uneven": uneven,
                "resuming behind a wrapper": bool(source),
            }
            self._agreement.check(facts)
        trouble = start.schedule(len(self.files)).trouble
        if trouble and topology.rank == 0:
            warnings.warn(trouble, stacklevel=3)
        self._position.begin()
        return start

    def begin(self, start: Start, role: int, owner: object) -> None:
        """The next ``iter()`` in this process reads the part ``role`` of ``start``."""
        self._next, self._inside = (start, role, owner), None
        self._reader.place = start.places[role]

    def end(self, owner: object) -> None:
        """An iteration that :meth:`begin` prepared for ``owner`` is over."""
        if self._inside is not None and self._inside[2] is owner:
            self._inside = None

    def follow(self, where: Callable[[], tuple[int, str]]) -> None:
        """Ask ``where`` for samples served and source, until this iteration is over."""
        self._position.follow(where)

    def finished(self, epoch: int) -> None:
        """The training loop has reached the end of an epoch."""
        self._position.finish(epoch)

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

    def topology(self) -> Topology:
        """Rank and worker of this process, now."""
        if get_worker_info() is not None and self._parent is not None:
            return Topology.current(*self._parent)
        return Topology.current(*self._given)

    def schedule(self, world_size: int, batch_size: int | None = None, *, drop_last: bool = False) -> Schedule:
        """Who reads what in a whole epoch."""
        uneven: Uneven = "drop" if drop_last and self.uneven == "keep" else self.uneven
        return Schedule(len(self.files), 0, world_size, batch_size or self.batch_size, uneven)

    def _read_for_itself(self, start: Start) -> Iterator[Any]:
        received = Received(start, len(self.files))
        self._position.follow(received.position)
        for sample in self._reader.read(start, 0, start.places[0]):
            received.add(Report(0, self.place))
            yield sample
        self._position.finish(start.epoch)

    def __getstate__(self) -> dict[str, Any]:
        values = {**self.__dict__, "_next": None, "_inside": None}
        if is_spawning():
            # A spawned worker has neither the process group nor, perhaps, the environment that told us.
            topology = self.topology()
            values["_parent"] = (topology.rank, topology.world_size)
        return values
