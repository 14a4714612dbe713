"""Checkpoints on a volume that exist whole or not at all."""

from __future__ import annotations

from airdata.checkpoint.manager import CheckpointManager
from airdata.checkpoint.policies import KeepBest, KeepEvery, KeepLast, Pinned
from airdata.checkpoint.publish import SaveSummary
from airdata.checkpoint.reader import UCVolumeReader
from airdata.checkpoint.staging import Stager
from airdata.checkpoint.state import PerRank, RNGState
from airdata.checkpoint.writer import UCVolumeWriter

__all__ = [
    "CheckpointManager",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "PerRank",
    "Pinned",
    "RNGState",
    "SaveSummary",
    "Stager",
    "UCVolumeReader",
    "UCVolumeWriter",
]
