"""What the writer and the reader have in common: one checkpoint's own folder, named to DCP without credentials."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from airdata.volume import Volume

__all__ = ["OnVolume", "check_positive"]


class OnVolume:
    """Stands on a folder of a volume."""

    _volume: Volume

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path names a volume."""
        try:
            Volume.of(checkpoint_id)
        except ValueError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path, without credentials."""
        return str(self._volume)

    def _stand_on(
        self, path: str | os.PathLike[str] | Volume | None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Move to another folder; None stays. Options that are not given are those of the folder before."""
        if path is not None:
            before = getattr(self, "_volume", None)
            options = before.storage_options if storage_options is None and before is not None else storage_options
            self._volume = Volume.of(path, options)


def check_positive(**numbers: float | None) -> None:
    """Refuse an argument that is zero or less; None is a default.

    Raises:
        ValueError: names the argument.
    """
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be positive")
