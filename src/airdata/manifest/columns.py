"""The columns of a manifest: built, put in order, read and digested without a Python object for each row."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from airdata.transport import FileInfo

__all__ = [
    "digest_of",
    "integers",
    "only_chunk",
    "pick",
    "readable",
    "rows_to_table",
    "serialized",
    "sorted_by_path",
]


def rows_to_table(rows: Sequence[FileInfo]) -> pa.Table:
    """The three columns of some files."""
    return pa.table(
        {
            # Binary, because a name on a local disk need not be valid UTF-8.
            "path": pa.array([os.fsencode(row.path) for row in rows], pa.large_binary()),
            "size": pa.array([row.size for row in rows], pa.int64()),
            "version": pa.array([row.version for row in rows], pa.large_string()),
        }
    )


def sorted_by_path(table: pa.Table) -> pa.Table:
    """Sorted by path, each path once, every column in one piece."""
    table = table.combine_chunks()
    if _rises(table):  # as a saved manifest does: to see that takes a tenth of the time to sort it again
        return table
    table = table.take(pc.sort_indices(table.column("path"), sort_keys=[("", "ascending")])).combine_chunks()
    if not _rises(table):
        paths = only_chunk(table.column("path"))
        first = pa.concat_arrays([pa.array([True]), pc.not_equal(paths[1:], paths[:-1])])
        table = table.filter(first).combine_chunks()
    return table


def _rises(table: pa.Table) -> bool:
    """Whether each path is greater than the one before it."""
    paths = only_chunk(table.column("path"))
    return len(paths) < 2 or bool(pc.all(pc.greater(paths[1:], paths[:-1])).as_py())  # noqa: PLR2004 - a pair


def only_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, so that a row is found in constant time."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def integers(column: pa.Array) -> npt.NDArray[np.int64]:
    """An int64 column without copying; ``to_numpy`` would import pandas (0.15 s and 24 MiB in every worker)."""
    return np.frombuffer(column.buffers()[1] or b"", "<i8", len(column), column.offset * 8)


def _ends(column: pa.Array) -> npt.NDArray[np.int64]:
    """Where the values of a large binary or string column begin and end in its content; one more than there are."""
    if not len(column):
        return np.zeros(1, np.int64)
    return np.frombuffer(column.buffers()[1], "<i8", len(column) + 1, column.offset * 8)


def pick(column: pa.Array, rows: npt.NDArray[np.int64], encoding: str, errors: str) -> list[str]:
    """Some values of a large binary or string column as text, straight from its buffers."""
    ends, view = _ends(column), memoryview(column.buffers()[2] or b"")
    bounds = zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)
    return [str(view[start:end], encoding, errors) for start, end in bounds]


def digest_of(column: pa.Array) -> str:
    """A digest of the values, whatever buffers hold them."""
    digest = hashlib.blake2b(digest_size=6)
    if pa.types.is_int64(column.type):
        digest.update(integers(column).data)
        return digest.hexdigest()
    ends = _ends(column)
    digest.update(np.diff(ends).data)
    digest.update(memoryview(column.buffers()[2] or b"")[ends[0] : ends[-1]])
    return digest.hexdigest()


def readable(table: pa.Table) -> pa.Table:
    """With paths as text for other readers, where they are text."""
    try:
        return table.set_column(0, "path", table.column("path").cast(pa.large_string()))
    except pa.ArrowInvalid:
        return table


def serialized(table: pa.Table) -> bytes:
    """A table as bytes, the same for the same values."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return bytes(sink.getvalue())
