"""The epoch and the position of a dataset, kept by the process that trains and seen by workers of any loader.

set_epoch, load ──► Position ──► begin() ──► an iteration ──► follow(), finish()
└─ shared memory ──► persistent workers of a loader that knows nothing of us
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

__all__ = ["Position"]

# Slots of the shared memory. Each worker writes a slot of its own only, so no lock is needed.
_EPOCH, _BASE, _LOADS, _READ_BY_WORKERS, _GROUPS, _FIRST_WORKER = range(6)
_MOST_WORKERS = 1024


class Position:
    """Where the next sample is.

    Attributes:
        resumes: whether the next iteration goes on from here; otherwise it begins the epoch anew.
    """

    def __init__(self) -> None:
        self.resumes = False
        self._where = (0, "")
        self._follow: Callable[[], tuple[int, str]] | None = None
        self._shared = share(torch.zeros(_FIRST_WORKER + _MOST_WORKERS, dtype=torch.int64))

    @property
    def epoch(self) -> int:
        """The number of the current epoch."""
        return int(self._shared[_EPOCH])

    def where(self) -> tuple[int, str]:
        """Samples of the epoch that were served by all ranks, and ``source`` as in :class:`airdata.state.State`."""
        return self._where if self._follow is None else self._follow()

    @property
    def groups(self) -> int:
        """Into how many groups the files are dealt; 0 before anything was read or loaded."""
        return int(self._shared[_GROUPS])

    @groups.setter
    def groups(self, groups: int) -> None:
        self._shared[_GROUPS] = groups

    @property
    def read_by_workers(self) -> bool:
        """Whether workers of a loader that does not report to us have read from here."""
        return bool(self._shared[_READ_BY_WORKERS])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the current one keeps its position, so that a resumed loop may name it again."""
        if epoch != self.epoch:
            self._set(epoch, 0, "", resumes=False)

    def load(self, epoch: int, served: int, source: str) -> None:
        """Go on from a saved position."""
        self._set(epoch, served, source, resumes=True)
        self._shared[_READ_BY_WORKERS] = 0

    def next_start(self) -> tuple[int, str]:
        """Samples served, and source, where the next iteration begins."""
        return self._where if self.resumes else (0, "")

    def begin(self) -> None:
        """An iteration has begun at :meth:`next_start`; the one after it will be a whole epoch."""
        served, source = self.next_start()
        self._set(self.epoch, served, source, resumes=False)

    def follow(self, where: Callable[[], tuple[int, str]]) -> None:
        """Ask ``where`` for the position, until the next change of epoch: most batches are never asked about."""
        self._follow = where

    def finish(self, epoch: int) -> None:
        """The training loop has been told that an epoch is over; the next one is current now."""
        self._set(epoch + 1, 0, "", resumes=False)

    def begin_in_worker(self, worker: int) -> tuple[int, int]:
        """Epoch and base of an iteration in a worker of a loader that knows nothing of us."""
        shared = self._shared
        shared[_READ_BY_WORKERS] = 1
        slot = _FIRST_WORKER + worker % _MOST_WORKERS
        # A loaded position is for the first iteration after the load only.
        base = int(shared[_BASE]) if shared[slot] != shared[_LOADS] else 0
        shared[slot] = shared[_LOADS]
        return self.epoch, base

    def _set(self, epoch: int, served: int, source: str, *, resumes: bool) -> None:
        self._where, self._follow, self.resumes = (served, source), None, resumes
        self._shared[_EPOCH] = epoch
        self._shared[_BASE] = served if resumes else 0
        if resumes:
            self._shared[_LOADS] += 1

    def __getstate__(self) -> dict[str, Any]:
        # Memory is shared with a worker that is being spawned; any other copy gets its own.
        shared = self._shared if is_spawning() else self._shared.tolist()
        return {**self.__dict__, "_shared": shared, "_where": self.where(), "_follow": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        if not isinstance(self._shared, torch.Tensor):
            self._shared = share(torch.tensor(self._shared, dtype=torch.int64))


def share(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in memory that is shared with child processes."""
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def is_spawning() -> bool:
    """Whether an object is being pickled for a process that multiprocessing starts."""
    return get_spawning_popen() is not None
