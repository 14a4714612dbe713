"""The files that a dataset reads, one manifest for each volume, and how one of them becomes a sample."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat
from typing import Any, Literal

import numpy as np

from airdata.arrival import wait_for_files
from airdata.cache import CachedFile, VolumeCache, find_file, open_file
from airdata.errors import ManifestError, MissingFilesError, TransferError
from airdata.manifest import UNKNOWN_SIZE, Manifest
from airdata.manifest.listing import list_volume, map_shared
from airdata.manifest.patterns import Selection
from airdata.mixing import Mixture, shares
from airdata.order import EpochOrder, Positions
from airdata.transport import FileInfo, open_transport
from airdata.volume import Volume, safe_url

__all__ = [
    "Entry",
    "Files",
    "Leases",
    "VolumeFile",
    "Yields",
    "check_choice",
    "choose_cache",
    "load_manifests",
    "to_sample",
]

Yields = Literal["path", "bytes", "file"]


@dataclass(frozen=True)
class VolumeFile:
    """One sample as ``yields="file"`` gives it.

    Attributes:
        path: in the volume, ``/`` as separator.
        local_path: on local disk; readable for the batch it came in.
        size: bytes.
        columns: the manifest's own columns for this file, such as labels.
    """

    path: str
    local_path: str
    size: int
    columns: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> bytes:
        """The content."""
        with open(self.local_path, "rb") as file:
            return file.read()


@dataclass(frozen=True)
class Entry(FileInfo):
    """A file of one of several volumes.

    Attributes:
        row: in the manifest of its volume.
        volume: number of the volume.
    """

    row: int = 0
    volume: int = 0


class Files:
    """The files of one or more volumes, as one sequence.

    Args:
        volumes: where they lie.
        selection: which of them, when they must be listed.
        manifests: one per volume, when they need not.
        cache: where copies lie; None for none.
        directory: where manifests lie that the processes of a node share.
        expected: how many files there must be before anything is read.
        weights: of the volumes, when an epoch is a mixture of them.

    Raises:
        ManifestError: manifests and volumes do not belong together.
        MissingFilesError: the manifests hold fewer files than expected.
    """

    def __init__(
        self,
        volumes: Sequence[Volume],
        selection: Selection,
        manifests: Sequence[Manifest] | None,
        cache: VolumeCache | None,
        directory: str | None,
        *,
        expected: int = 0,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.volumes = tuple(volumes)
        self.in_place = all(volume.in_place for volume in volumes)
        self._transports = tuple(open_transport(volume) for volume in volumes)
        self._selection = selection
        self._cache = cache
        self._directory = directory
        self._expected = expected
        self._weights = None if weights is None else tuple(weights)
        self._manifests: tuple[Manifest, ...] | None = None
        self._ends: list[int] = []
        if manifests is not None:
            if len(manifests) != len(volumes):
                raise ManifestError(f"{len(volumes)} volumes and {len(manifests)} manifests were given")
            for volume, manifest in zip(volumes, manifests, strict=True):
                _check_source(volume, manifest)
            self._manifests = tuple(map_shared(manifest, directory) for manifest in manifests)
            found = sum(map(len, manifests))
            if found < expected:
                raise MissingFilesError(f"the manifest holds {found} files, and expected_files={expected}")

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifest of each volume, listed when first needed."""
        if self._manifests is None:
            listings = [partial(list_volume, one, self._selection, self._directory) for one in self._transports]
            names = ", ".join(volume.name for volume in self.volumes)
            self._manifests = wait_for_files(listings, self._expected, names)
        return self._manifests

    @property
    def retries(self) -> int:
        """Requests to the volumes that were repeated in this process; only grows."""
        return sum(transport.retries for transport in self._transports)

    @property
    def fingerprint(self) -> str:
        """Changes with any path, size or version."""
        return "+".join(manifest.fingerprint for manifest in self.manifests)

    def difference(self, fingerprint: str) -> str:
        """In words, in what these files differ from those with another fingerprint; "" when they do not."""
        theirs = fingerprint.split("+")
        if len(theirs) != len(self.manifests):
            return f"there were {len(theirs)} volumes and there are {len(self.manifests)}"
        changed = [
            f"the {words} of {volume} have changed"
            for volume, manifest, their in zip(self.volumes, self.manifests, theirs, strict=True)
            if (words := manifest.difference(their))
        ]
        return "; ".join(changed)

    def __len__(self) -> int:
        return self._offsets()[-1]

    def _offsets(self) -> list[int]:
        if not self._ends:
            self._ends = list(accumulate(len(manifest) for manifest in self.manifests))
        return self._ends

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each volume in an epoch; None when the volumes are read as one."""
        return None if self._weights is None else shares(self._weights, list(map(len, self.manifests)))

    def order(self, seed: int, epoch: int, *, shuffle: bool, groups: int = 1) -> Callable[[Positions], Positions]:
        """What maps the positions of an epoch to the numbers of its files."""
        order = EpochOrder(seed, epoch, len(self), shuffle=shuffle, groups=groups)
        if self.shares is None:
            return order.__getitem__
        mixture = Mixture(seed, epoch, list(map(len, self.manifests)), self.shares)
        return lambda positions: mixture[order[positions]]

    def take(self, indices: Positions) -> list[Entry]:
        """The entries with these numbers."""
        ends = np.asarray(self._offsets())
        of_volume = np.searchsorted(ends, indices, side="right")
        found: list[Entry | None] = [None] * len(indices)
        for volume in np.unique(of_volume).tolist():
            places = np.flatnonzero(of_volume == volume)
            rows = indices[places] - (self._ends[volume - 1] if volume else 0)
            entries = map(Entry, *self.manifests[volume].fields(rows), rows.tolist(), repeat(volume))
            for place, entry in zip(places.tolist(), entries, strict=True):
                found[place] = entry
        return [entry for entry in found if entry is not None]

    def __getitem__(self, index: int) -> Entry:
        return self.take(np.array([index]))[0]

    def open(self, entry: FileInfo, *, looked: bool = False) -> CachedFile:
        """A lease on the local file of an entry, fetched if need be; ``looked``: :meth:`find` has just not found it."""
        assert isinstance(entry, Entry)
        transport = self._transports[entry.volume]
        if entry.size == UNKNOWN_SIZE:
            file = transport.stat(entry.path)
            if file.size == UNKNOWN_SIZE:  # a cache that cannot check a length would serve half a file as a whole one
                raise TransferError(f"{self.name(entry)}: its source does not tell how large it is")
            entry, looked = Entry(file.path, file.size, file.version, entry.row, entry.volume), False
        return open_file(self._cache, transport, entry, looked=looked)

    def find(self, entry: FileInfo) -> CachedFile | None:
        """The same lease if the file is on local disk already; None, at once, if it must be fetched."""
        assert isinstance(entry, Entry)
        if entry.size == UNKNOWN_SIZE:
            return None
        return find_file(self._cache, self._transports[entry.volume], entry)

    def name(self, entry: Entry) -> str:
        """The full name of a file, for messages."""
        return f"{self.volumes[entry.volume].name}/{entry.path}"


def _check_source(volume: Volume, manifest: Manifest) -> None:
    if manifest.source and manifest.source.rstrip("/") not in {safe_url(volume.url), volume.name}:
        raise ManifestError(
            f"the manifest lists {manifest.source}, and the dataset reads {volume.name} ({safe_url(volume.url)}). If "
            "these are the same files under another name, set manifest.source = ''."
        )


def to_sample(files: Files, entry: Entry, lease: CachedFile, yields: Yields) -> Any:
    """What the consumer gets of a leased file."""
    if yields == "path":
        return lease.local_path
    if yields == "bytes":
        with open(lease.local_path, "rb") as file:
            return file.read()
    columns = files.manifests[entry.volume].columns(entry.row)
    return VolumeFile(entry.path, lease.local_path, lease.size, columns)


class Leases:
    """The latest leases of one reader: a yielded path must open in the training loop, some batches later."""

    def __init__(self) -> None:
        self._held: deque[CachedFile] = deque()
        self._pid = os.getpid()

    def keep(self, lease: CachedFile, most: int) -> None:
        """Hold one more, and no more than ``most``."""
        self._held.append(lease)
        while len(self._held) > most:
            self._held.popleft().release()

    def release(self) -> None:
        """Let go of all, unless they are those of the process that forked this one."""
        held, self._held = self._held, deque()
        if os.getpid() == self._pid:
            for lease in held:
                lease.release()
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Leases, ()


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def choose_cache(
    cache: VolumeCache | bool | None,  # noqa: FBT001 - False is the documented way to have none
    cache_dir: str | os.PathLike[str] | None,
    cache_bytes: int | None,
    min_free_bytes: int | None,
) -> VolumeCache | None:
    """The cache that these arguments mean.

    Raises:
        ValueError: they contradict each other.
    """
    if cache is None or cache is True:
        return VolumeCache(cache_dir, max_bytes=cache_bytes, min_free_bytes=min_free_bytes)
    if cache_dir is not None or cache_bytes is not None or min_free_bytes is not None:
        raise ValueError("give either cache= or cache_dir=, cache_bytes= and min_free_bytes=, not both")
    return cache or None


def load_manifests(manifest: Any, storage_options: Mapping[str, Any] | None) -> list[Manifest] | None:
    """The manifests a user gave, one or several, as values or as the paths of saved ones."""
    if manifest is None:
        return None
    given = [manifest] if isinstance(manifest, (Manifest, str, os.PathLike)) else list(manifest)
    return [one if isinstance(one, Manifest) else Manifest.load(one, storage_options) for one in given]
