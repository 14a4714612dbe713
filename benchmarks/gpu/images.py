"""Images of about 110 KB, how they are decoded with what is installed here, and both loaders' datasets of them."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

import gpu.latency_store  # noqa: F401 - registers the store
from airdata import UCVolumeDataset

SIDE, CROP, BYTES, CLASSES = 256, 224, 110_000, 100
_DISTINCT = 64
PIL = importlib.util.find_spec("PIL") is not None
try:
    from torchvision.io import decode_jpeg
except (ImportError, RuntimeError):  # not installed, or for another torch than the one that is here
    decode_jpeg = None


def how_decoded() -> str:
    """In words."""
    if PIL:
        decoder = "torchvision" if decode_jpeg else "PIL"
        return f"JPEG of {SIDE} by {SIDE}, decoded by {decoder}, cropped to {CROP} by {CROP}"
    return "no decoder is installed: raw pixels of 192 by 192"


def write_images(folder: str, count: int) -> None:
    """That many files in class folders; links to a few different ones, since the contents do not matter."""
    made = []
    for number in range(_DISTINCT):
        path = Path(folder, "originals", f"{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_image(number))
        made.append(path)
    for label in range(CLASSES):
        Path(folder, "train", f"{label:03d}").mkdir(parents=True)
    for number in range(count):
        os.link(made[number % _DISTINCT], f"{folder}/train/{number % CLASSES:03d}/{number:06d}.jpg")


def _image(seed: int) -> bytes:
    """A picture with noise, at the quality that gives the wanted size."""
    random = np.random.default_rng(seed)
    if not PIL:
        return random.bytes(3 * 192 * 192)
    from PIL import Image

    waves = np.sin(np.linspace(0, 9, SIDE))[:, None, None] * np.cos(np.linspace(0, 7, SIDE))[None, :, None] * 60
    pixels = np.clip(128 + waves + random.normal(0, 45, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
    encoded = b""
    for quality in range(98, 60, -2):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "jpeg", quality=quality)
        encoded = file.getvalue()
        if len(encoded) <= BYTES * 1.05:
            break
    return encoded


def decode(content: bytes) -> torch.Tensor:
    """(3, H, W) bytes."""
    if decode_jpeg is not None and PIL:
        # A copy, since the bytes of Python cannot be written to, which torch warns of.
        pixels = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    elif PIL:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    else:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)[: 3 * 192 * 192].view(3, 192, 192)
    edge = (SIDE - CROP) // 2
    return pixels[:, edge : edge + CROP, edge : edge + CROP].contiguous()


class Ours(IterableDataset):
    """(image, label) of the files that airdata brings."""

    def __init__(self, files: UCVolumeDataset) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for path in self.files:
            yield decode(Path(path).read_bytes()), int(Path(path).parts[-2])


class Stock(Dataset):
    """(image, label) of files read one after another in each worker: from the store, as from a mount, or a folder."""

    def __init__(self, place: str, names: list[str]) -> None:
        self.place, self.names = place, names
        self._store: Any = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self._store = self._store or fsspec.core.url_to_fs(self.place)[0]
        name = self.names[index]
        return decode(self._store.cat_file(f"{self.place}/{name}")), int(name.split("/")[0])
