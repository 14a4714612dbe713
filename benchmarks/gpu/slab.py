"""The floor under everything that copies or stores a state: one page-locked buffer, one file, nothing else."""

from __future__ import annotations

import os
import time

import torch

from gpu.machine import across, synchronize
from gpu.state import State

_PIECE = 64 << 20


class Slab:
    """Host memory for one rank's part of a state, page-locked where there is CUDA, allocated and touched once."""

    def __init__(self, state: State, device: torch.device) -> None:
        self.state, self.device = state, device
        self.memory = torch.zeros(state.local_bytes, dtype=torch.uint8)
        if device.type == "cuda":
            status = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0))
            if status:
                raise RuntimeError(f"{self.memory.numel()} bytes of host memory could not be page-locked ({status})")

    def copy(self) -> float:
        """Seconds of the copy from the device, on the slowest rank."""
        synchronize(self.device)
        across(0)
        began, at = time.perf_counter(), 0
        for tensor, _ in self.state.locals():
            raw = tensor.reshape(-1).view(torch.uint8)
            self.memory[at : at + raw.numel()].copy_(raw, non_blocking=True)
            at += raw.numel()
        synchronize(self.device)
        return across(time.perf_counter() - began)

    def write(self, path: str) -> float:
        """Seconds of writing it to a file of this rank's own and of fsync, on the slowest rank."""
        across(0)
        began = time.perf_counter()
        view = memoryview(self.memory.numpy())
        with open(path, "wb", buffering=0) as file:
            file.writelines(view[at : at + _PIECE] for at in range(0, len(view), _PIECE))
            os.fsync(file.fileno())
        return across(time.perf_counter() - began)

    def read(self, path: str) -> float:
        """Seconds of reading that file and of copying it to the device, on the slowest rank."""
        across(0)
        began, at = time.perf_counter(), 0
        view = memoryview(self.memory.numpy())
        with open(path, "rb", buffering=0) as file:
            for start in range(0, len(view), _PIECE):
                file.readinto(view[start : start + _PIECE])
        for tensor, _ in self.state.locals():
            raw = tensor.reshape(-1).view(torch.uint8)
            raw.copy_(self.memory[at : at + raw.numel()], non_blocking=True)
            at += raw.numel()
        synchronize(self.device)
        return across(time.perf_counter() - began)

    def close(self) -> None:
        """Give the memory back."""
        if self.device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        self.memory = torch.empty(0, dtype=torch.uint8)


def drop_from_page_cache(folder: str) -> None:
    """Have the next reads of these files come from the disk; they must have been synced."""
    for directory, _, names in os.walk(folder):
        for name in names:
            file = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
