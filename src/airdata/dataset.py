"""UCVolumeDataset: the files of a volume as samples.

volume ──► manifest ──► order of the epoch ──► this worker's share ──► prefetch ──► cache ──► path, bytes or file
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from airdata.cache import VolumeCache
from airdata.errors import StateError
from airdata.files import Files, VolumeFile, Yields, check_choice, choose_cache, load_manifests
from airdata.manifest import Manifest
from airdata.manifest.patterns import Pattern, Selection
from airdata.metrics import Counters
from airdata.mixing import shares
from airdata.order import Positions
from airdata.reading import OnError, Reading
from airdata.schedule import UNEVEN, Uneven
from airdata.source import Scope, Sharing, Source
from airdata.state import State
from airdata.topology import Topology
from airdata.volume import Volume

__all__ = ["UCVolumeDataset", "VolumeFile"]


class UCVolumeDataset(Source):
    """The files of a volume, copied to local disk when first read.

    Yields ``str`` paths on local disk whose tail is the file's path in the volume, so a folder name can be a label.
    Wrap it in another ``IterableDataset`` to decode, and read it through :class:`airdata.DataLoader`.

    Args:
        path: a volume directory or URL, or a list of them, which are read as one.
        weights: of a list of paths, to mix them at random in these proportions. Each is dealt like a deck of cards,
            over as many epochs as it lasts, and shuffled again when it runs out: no file comes again before all others
            of its path have come. An epoch has as many samples as there are files in all. Needs ``shuffle=True``.
        pattern: a glob such as ``"**/*.jpg"``, a list of globs, or a predicate on the path in the volume.
        recursive: whether folders inside folders are searched.
        shuffle: whether each epoch has an order of its own.
        seed: of the shuffle.
        shuffle_scope: ``"global"``: any rank may read any file in any epoch; ``"group"``: each file belongs to one node
            for good, so that its cache serves it in every epoch. Files are dealt to as many groups as there are nodes
            in the first run; the order is the same on any number of nodes.
        groups: with ``shuffle_scope="group"``, their number in place of that: a multiple of every number of nodes that
            the job may ever run on.
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
        prefetch: files fetched at the same time, at most, by all processes of a node together; up to four times as many
            wait to be delivered. By default 64, or 32 for each process where that is more.
        prefetch_bytes: most bytes that wait, likewise.
        yields: ``"path"``, ``"bytes"``, or ``"file"`` for a :class:`VolumeFile`.
        storage_options: arguments of the fsspec driver.
        manifest: a :class:`airdata.Manifest` or the path of a saved one, so that nothing is listed; a list for a list
            of paths.
        expected_files: how many files there must be, at least. They are waited for as long as more keep coming.
        rank: this process's rank among those who share the data; with ``world_size``. Found by itself when left out.
        world_size: how many processes share the data.
        nodes: how many machines these are on, equally many in a row on each; for ``shuffle_scope="group"``. Found by
            itself when left out.

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
        weights: Sequence[float] | None = None,
        pattern: Pattern = None,
        recursive: bool = True,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_scope: Scope = "global",
        groups: int | None = None,
        uneven: Uneven = "keep",
        on_error: OnError = "raise",
        max_bad_files: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        min_free_bytes: int | None = None,
        cache: VolumeCache | bool | None = None,
        prefetch: int | None = None,
        prefetch_bytes: int = 512 << 20,
        yields: Yields = "path",
        storage_options: Mapping[str, Any] | None = None,
        manifest: Manifest | str | os.PathLike[str] | Sequence[Manifest | str | os.PathLike[str]] | None = None,
        expected_files: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        nodes: int | None = None,
    ) -> None:
        check_choice("uneven", uneven, UNEVEN)
        check_choice("on_error", on_error, get_args(OnError))
        check_choice("yields", yields, get_args(Yields))
        check_choice("shuffle_scope", shuffle_scope, get_args(Scope))
        if on_error == "skip" and uneven != "keep":
            raise ValueError(
                f'on_error="skip" gives ranks different numbers of samples, so uneven={uneven!r} cannot hold'
            )
        if (prefetch is not None and prefetch < 1) or prefetch_bytes < 1:
            raise ValueError(f"prefetch={prefetch} and prefetch_bytes={prefetch_bytes} must be positive")
        if groups is not None and (groups < 1 or shuffle_scope != "group"):
            raise ValueError(f'groups={groups} must be positive, and needs shuffle_scope="group"')
        if rank is not None or world_size is not None or nodes is not None:
            Topology.current(rank, world_size, nodes)
        paths = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
        if not paths:
            raise ValueError("path=[] names no volume")
        check_weights(weights, len(paths), shuffle=shuffle, scope=shuffle_scope)
        volumes = [Volume.of(one, storage_options) for one in paths]
        kept = choose_cache(cache, cache_dir, cache_bytes, min_free_bytes)
        files = Files(
            volumes,
            Selection(pattern, recursive),
            load_manifests(manifest, storage_options),
            kept,
            os.path.join((kept or VolumeCache(cache_dir)).directory, "manifests"),
            expected=expected_files,
            weights=weights,
        )
        reading = Reading(bool(shuffle), int(seed), on_error, max_bad_files, prefetch, prefetch_bytes, yields)
        super().__init__(files, reading, Sharing(uneven, shuffle_scope, groups, rank, world_size, nodes))

    @property
    def manifest(self) -> Manifest:
        """The list of files; it is made when first needed.

        Raises:
            EmptyListingError: there is no such file.
            MissingFilesError: there are fewer than ``expected_files``.
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

        Need not be called: an iteration that reaches its end makes the next epoch current. (With a loader that is not
        ours it must be: that does not tell us of the end.)
        """
        self._position.set_epoch(int(epoch))

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        schedule, rank = self.schedule()
        return schedule.length(rank)

    def state_dict(self) -> dict[str, Any]:
        """The position: plain ints and strings, the same on every rank.

        In a worker of a loader that is not ours, such as torchdata's, it is that of the worker.

        Raises:
            StateError: the position is not known here, since another loader's workers read the data.
        """
        return self._state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position: the next iteration yields the rest of its epoch, the one after it a whole one.

        Raises:
            StateError: it was saved with other files, another seed, shuffle or mixture, or by another version; says
            what differs.
        """
        state = State.from_dict(state_dict)
        differs = self._differences(state)
        if differs:
            raise StateError(
                f"this position does not fit the dataset: {'; '.join(differs)}. To go on with the very files it was "
                "saved with, keep a manifest (dataset.manifest.save) and pass it as manifest=."
            )
        if not 0 <= state.samples_served <= state.n:
            raise StateError(f"samples_served={state.samples_served} is not a position among {state.n} samples")
        self._load(state)

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
        topology, rows = self.topology(), self._rows_of_node()
        share = rows[topology.local_rank :: topology.local_world_size]
        return self._reader.warm(share, topology.local_world_size, progress=progress)

    def _rows_of_node(self) -> range | Positions:
        """The files that this process's node may read."""
        start = self._start(self._position.epoch)
        if start.nodes == 1:
            return range(len(self.files))
        node = start.rank * start.nodes // start.world_size
        reading = self._reading
        order = self.files.order(reading.seed, start.epoch, shuffle=reading.shuffle, groups=start.groups)
        return order(np.arange(node, len(self.files), start.nodes))


def check_weights(weights: Sequence[float] | None, paths: int, *, shuffle: bool, scope: Scope) -> None:
    """Raise ValueError unless these weights can mix so many paths."""
    if weights is None:
        return
    if len(weights) != paths:
        raise ValueError(f"weights={list(weights)} must have one number for each of {paths} paths")
    shares(weights, [1] * paths)
    if not shuffle:
        raise ValueError("weights= mixes paths at random, so it needs shuffle=True")
    if scope == "group":
        raise ValueError('with weights=, files come in some epochs only and belong to no node: shuffle_scope="global"')
