"""Stream the files of a volume into PyTorch training, and store sharded checkpoints on it.

Names are imported when first used, so ``import airdata`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airdata.cache import CacheInfo, VolumeCache, cache_info, clear_cache
    from airdata.checkpoint import CheckpointManager, RNGState, UCVolumeReader, UCVolumeWriter
    from airdata.dataset import UCVolumeDataset
    from airdata.errors import (
        AirdataError,
        BadFilesError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CorruptCheckpointError,
        EmptyListingError,
        FetchError,
        ManifestError,
        MissingFilesError,
        SourceChangedError,
        StagingFullError,
        StalledError,
        StateError,
        TopologyError,
        TransferError,
        VolumeError,
    )
    from airdata.files import VolumeFile
    from airdata.loader import DataLoader, LoaderStats
    from airdata.manifest import Manifest
    from airdata.metrics import Counters
    from airdata.state import Checkpointable
    from airdata.volume import Volume

__all__ = [
    "AirdataError",
    "BadFilesError",
    "CacheInfo",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "Checkpointable",
    "CorruptCheckpointError",
    "Counters",
    "DataLoader",
    "EmptyListingError",
    "FetchError",
    "LoaderStats",
    "Manifest",
    "ManifestError",
    "MissingFilesError",
    "RNGState",
    "SourceChangedError",
    "StagingFullError",
    "StalledError",
    "StateError",
    "TopologyError",
    "TransferError",
    "UCVolumeDataset",
    "UCVolumeReader",
    "UCVolumeWriter",
    "Volume",
    "VolumeCache",
    "VolumeError",
    "VolumeFile",
    "cache_info",
    "clear_cache",
]

_MODULES = {
    "airdata.cache": ("CacheInfo", "VolumeCache", "cache_info", "clear_cache"),
    "airdata.checkpoint": ("CheckpointManager", "RNGState", "UCVolumeReader", "UCVolumeWriter"),
    "airdata.dataset": ("UCVolumeDataset",),
    "airdata.files": ("VolumeFile",),
    "airdata.loader": ("DataLoader", "LoaderStats"),
    "airdata.manifest": ("Manifest",),
    "airdata.metrics": ("Counters",),
    "airdata.state": ("Checkpointable",),
    "airdata.volume": ("Volume",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE.get(name, "airdata.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
