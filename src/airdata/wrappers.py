"""Which datasets of files a dataset reads from, however it is wrapped."""

from __future__ import annotations

from torch.utils.data import Dataset

from airdata.dataset import UCVolumeDataset

__all__ = ["find_sources"]

_SEARCH_DEPTH = 8


def find_sources(dataset: object) -> list[UCVolumeDataset]:
    """The UCVolumeDatasets that a dataset reads from: itself, or those in its attributes, and in theirs."""
    found: list[UCVolumeDataset] = []
    seen: set[int] = set()

    def look(value: object, depth: int) -> None:
        if id(value) in seen or depth > _SEARCH_DEPTH:
            return
        if isinstance(value, UCVolumeDataset):
            seen.add(id(value))
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Dataset):
                    look(item, depth + 1)
        elif isinstance(value, Dataset):
            seen.add(id(value))
            for attribute in vars(value).values():
                if isinstance(attribute, (Dataset, list, tuple)):
                    look(attribute, depth + 1)

    look(dataset, 0)
    return found
