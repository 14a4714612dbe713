"""Every error a caller of airdata can catch.

All derive from :class:`AirdataError`. Where Python or PyTorch users already catch a built-in class for the same event
(``FileNotFoundError``, ``TimeoutError``, ``OSError``, ``ValueError``), ours derives from that one too.
"""

from __future__ import annotations

__all__ = [
    "AirdataError",
    "BadFilesError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "EmptyListingError",
    "FetchError",
    "ManifestError",
    "MissingFilesError",
    "OutcomeUnknownError",
    "SourceChangedError",
    "StagingFullError",
    "StalledError",
    "StateError",
    "TopologyError",
    "TransferError",
    "VolumeError",
]


class AirdataError(Exception):
    """Base of every error of this package."""


# --- where things live -------------------------------------------------------------------------------------------


class VolumeError(AirdataError, ValueError):
    """A path that names no volume: not mounted, not mapped, a mangled URL, or a scheme without a driver."""


# --- moving bytes ------------------------------------------------------------------------------------------------


class TransferError(AirdataError, OSError):
    """A read, write or listing failed for good: it was permanent, or its retries and deadline are used up."""


class OutcomeUnknownError(TransferError):
    """A change was under way when the deadline came, and may be carried out yet; what depends on it must stay."""


class SourceChangedError(TransferError):
    """The source no longer holds the bytes its listing promised: another size or version, or it vanished."""


class StalledError(AirdataError, TimeoutError):
    """No byte moved for the time-out; the message names the file."""


# --- data --------------------------------------------------------------------------------------------------------


class EmptyListingError(AirdataError, FileNotFoundError):
    """A volume, or a pattern on it, matched no file within the wait."""


class MissingFilesError(AirdataError, FileNotFoundError):
    """Fewer files than ``expected_files`` are visible, and no more have come for a while."""


class ManifestError(AirdataError, ValueError):
    """A saved manifest cannot be read, or belongs to another volume."""


class StateError(AirdataError, ValueError):
    """A saved position does not fit this dataset; the message says what differs."""


class TopologyError(AirdataError, RuntimeError):
    """Rank facts contradict each other, within a process or between ranks."""


class FetchError(AirdataError, OSError):
    """One sample's file could not be brought to local disk; ``path`` is its name in the volume."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[type[FetchError], tuple[str, str]]:
        return type(self), (str(self), self.path)


class BadFilesError(AirdataError, RuntimeError):
    """More files were bad than ``max_bad_files`` allows."""


# --- checkpoints -------------------------------------------------------------------------------------------------


class CheckpointError(AirdataError, RuntimeError):
    """A save or load failed. Nothing was published or loaded, unless the message says that other ranks were lost."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no published checkpoint at this path."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A checkpoint is published here and ``overwrite=False``."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes differ from their digest, or a file is missing or short; names the file and the tensor."""


class StagingFullError(CheckpointError, OSError):
    """The staging disk has no room for the next shard file."""
