"""The frozen, sorted list of a volume's files.

    listing ──► columns path, size, version (+ the user's own), sorted by the bytes of the path ──► Arrow IPC file
                                                                                                       │ mmap
                                                              every process of the node ◄──────────────┘

A mapped manifest costs a process next to nothing (about 1 MiB of private memory for two million files, against 307 MiB
for a Python list), and pickles as the name of its file.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from airdata.errors import ManifestError
from airdata.manifest.columns import (
    digest_of,
    integers,
    only_chunk,
    pick,
    readable,
    rows_to_table,
    serialized,
    sorted_by_path,
)
from airdata.transport import FileInfo
from airdata.volume import Volume

__all__ = ["UNKNOWN_SIZE", "Manifest"]

UNKNOWN_SIZE = -1
_OWN = ("path", "size", "version")
_SOURCE = b"airdata.source"
_FINGERPRINT = b"airdata.fingerprint"
_ROWS_AT_ONCE = 1 << 16
_PATH_CODEC = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # what os.fsencode uses


class Manifest(Sequence[FileInfo]):
    """The files of one volume, sorted by the bytes of their paths; ``manifest[i]`` is a :class:`FileInfo`.

    Attributes:
        source: the volume that was listed, without credentials; "" when the paths came from elsewhere.
        fingerprint: changes with any path, size or version: three short digests, one of each column.
    """

    def __init__(self, table: pa.Table, file: str | None = None) -> None:
        self._table = table
        self._file = file
        self._path, self._size, self._version = (only_chunk(table.column(name)) for name in _OWN)
        self._extra = {name: only_chunk(table.column(name)) for name in table.column_names if name not in _OWN}
        metadata = table.schema.metadata or {}
        self.source = (metadata.get(_SOURCE) or b"").decode()
        # Read back only from an Arrow file of our own: to digest a million rows takes 0.2 s and touches every page.
        known = metadata.get(_FINGERPRINT) if file is not None else None
        self.fingerprint = (
            known.decode()
            if known
            else ".".join(digest_of(column) for column in (self._path, self._size, self._version))
        )

    # --- making one ---

    @staticmethod
    def from_files(files: Iterable[FileInfo], source: str = "") -> Manifest:
        """A manifest of what a listing gave, in any order; a path given twice counts once."""
        batches: list[pa.Table] = []
        rows: list[FileInfo] = []
        for file in files:
            rows.append(file)
            if len(rows) == _ROWS_AT_ONCE:  # Arrow holds a row in a tenth of what Python objects take
                batches.append(rows_to_table(rows))
                rows = []
        table = pa.concat_tables([*batches, rows_to_table(rows)]).combine_chunks()
        return Manifest(sorted_by_path(table).replace_schema_metadata({_SOURCE: source.encode()}))

    @staticmethod
    def from_paths(
        paths: Iterable[str],
        sizes: Sequence[int] | None = None,
        versions: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Manifest:
        """A manifest of paths you know, so that nothing needs to be listed.

        Args:
            paths: relative to the volume, ``/`` as separator.
            sizes: bytes of each file. Without them every file is asked for its size before it is read.
            versions: what changes when the content does, one for each file.
            columns: values that ride along with each file, such as labels; see ``UCVolumeDataset(yields="file")``.

        Raises:
            ManifestError: columns of another length, a path given twice, or a path that leaves the volume.
        """
        names = [os.fsencode(path) for path in paths]
        count = len(names)
        for path in names:
            parts = path.split(b"/")
            if not path or path.startswith(b"/") or b".." in parts or b"\0" in path:
                raise ManifestError(f"{os.fsdecode(path)!r} must be a path inside the volume, without a leading slash")
        given: dict[str, Any] = {
            "path": pa.array(names, pa.large_binary()),
            "size": pa.array([UNKNOWN_SIZE] * count if sizes is None else sizes, pa.int64()),
            "version": pa.array([""] * count if versions is None else versions, pa.large_string()),
            **(columns or {}),
        }
        for name, values in given.items():
            if len(values) != count:
                raise ManifestError(f"{count} paths and {len(values)} values of {name!r}")
        table = sorted_by_path(pa.table(given))
        if len(table) != count:
            raise ManifestError(f"{count - len(table)} of {count} paths are given more than once")
        return Manifest(table)

    # --- what is in it ---

    def __len__(self) -> int:
        return len(self._path)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        count = len(self)
        if not -count <= row < count:
            raise IndexError(f"row {row} of a manifest of {count} files")
        return self.take(np.array([int(row) % count]))[0]

    def __iter__(self) -> Iterator[FileInfo]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self.take(np.arange(start, min(start + _ROWS_AT_ONCE, len(self))))

    def take(self, rows: npt.NDArray[np.int64]) -> list[FileInfo]:
        """The files in some rows: a tenth of the cost of asking for each by itself."""
        return list(map(FileInfo, *self.fields(rows)))

    def fields(self, rows: npt.NDArray[np.int64]) -> tuple[list[str], list[int], list[str]]:
        """The paths, sizes and versions of the files in some rows."""
        return (
            pick(self._path, rows, *_PATH_CODEC),
            integers(self._size)[rows].tolist(),
            pick(self._version, rows, "utf-8", "strict"),
        )

    def columns(self, row: int) -> dict[str, Any]:
        """The values of the user's own columns that belong to a file."""
        return {name: column[row].as_py() for name, column in self._extra.items()}

    @property
    def total_bytes(self) -> int:
        """The sum of the known sizes."""
        sizes = integers(self._size)
        return int(sizes[sizes >= 0].sum())

    @property
    def is_mapped(self) -> bool:
        """Whether it lies in a file that other processes map too."""
        return self._file is not None

    @property
    def memory_bytes(self) -> int:
        """What it takes, in memory or in its file."""
        return int(self._table.nbytes)

    def content_digest(self) -> str:
        """Changes with anything in it, also the source and the user's own columns."""
        digest = hashlib.blake2b(f"{self.fingerprint} {self.source}".encode(), digest_size=16)
        if self._extra:
            digest.update(serialized(self._table.select(list(self._extra))))
        return digest.hexdigest()

    def difference(self, fingerprint: str) -> str:
        """In words, in what another manifest with this fingerprint differs; "" when it does not."""
        theirs, ours = fingerprint.split("."), self.fingerprint.split(".")
        if len(theirs) != len(ours):
            return "fingerprints of different kinds"
        changed = [name for name, a, b in zip(("paths", "sizes", "versions"), theirs, ours, strict=True) if a != b]
        return " and ".join(changed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and bool(self._table.equals(other._table))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Manifest({len(self)} files, {self.total_bytes:,} bytes, source={self.source!r})"

    # --- keeping one ---

    def save(self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        """Write it as a Parquet file, to any directory or URL that a volume can have."""
        from airdata.transport import open_transport  # noqa: PLC0415 - the one place besides load that moves bytes

        buffer = io.BytesIO()
        pq.write_table(readable(self._table), buffer)
        folder, name = posixpath.split(os.fspath(path))
        open_transport(Volume.of(folder or ".", storage_options)).put(name, buffer.getvalue())

    @staticmethod
    def load(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Manifest:
        """Read what :meth:`save` wrote.

        Raises:
            ManifestError: there is no such file, or it is no manifest.
        """
        from airdata.transport import open_transport  # noqa: PLC0415

        folder, name = posixpath.split(os.fspath(path))
        try:
            content = open_transport(Volume.of(folder or ".", storage_options)).read(name)
        except FileNotFoundError:
            raise ManifestError(f"{os.fspath(path)}: there is no such manifest") from None
        try:
            table = pq.read_table(io.BytesIO(content))
        except (pa.ArrowException, OSError) as error:
            raise ManifestError(f"{os.fspath(path)} is not a manifest: {error}") from error
        missing = [name for name in _OWN if name not in table.column_names]
        if missing:
            raise ManifestError(f"{os.fspath(path)} is not a manifest: it has no column {', '.join(missing)}")
        for position, kind in enumerate((pa.large_binary(), pa.int64(), pa.large_string())):
            index = table.column_names.index(_OWN[position])
            table = table.set_column(index, _OWN[position], table.column(index).cast(kind))
        return Manifest(sorted_by_path(table))

    def write(self, file: str) -> Manifest:
        """Write the Arrow file ``file`` in one act and return the manifest that maps it."""
        metadata = {_SOURCE: self.source.encode(), _FINGERPRINT: self.fingerprint.encode()}
        table = self._table.replace_schema_metadata(metadata)
        descriptor, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=os.path.dirname(file))
        try:
            with open(descriptor, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            os.replace(part, file)
        except BaseException:
            os.unlink(part)
            raise
        return Manifest.map(file)

    @staticmethod
    def map(file: str) -> Manifest:
        """The manifest in an Arrow file, mapped into memory.

        Raises:
            ManifestError: the file is gone or broken.
        """
        try:
            with pa.memory_map(file) as source:
                return Manifest(pa.ipc.open_file(source).read_all(), file)
        except (OSError, pa.ArrowException) as error:
            raise ManifestError(f"the manifest {file} cannot be mapped: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is not None:
            return Manifest.map, (self._file,)
        return Manifest, (self._table,)
