"""The ranks that save and load together, and how they stay of one mind.

One rank decides and the others follow (ranks that look at a shared file system separately see different things:
xtuner#1852), and an error of one is an error of all, at once, instead of a time-out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from airdata.errors import CheckpointError, CorruptCheckpointError
from airdata.transport.retry import describe

__all__ = ["Ranks", "as_checkpoint_error"]

T = TypeVar("T")


class Ranks:
    """This process among the ranks of the default process group; alone when there is none.

    Has a gloo group of its own: a background save that shared a group with training could take its messages for its own
    and deadlock (KempnerForge#104), and the groups of NCCL carry nothing from the CPU.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        group: for DCP; None when alone.
    """

    def __init__(self, timeout: float) -> None:
        self.group: Any = None
        self._timeout = timeout
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        else:
            # DCP says at every save and load that it takes this for a single process. It is one.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.group is None

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """What ``choose`` returns or raises on the coordinator, on every rank."""
        if self.alone:
            return choose()
        answer: list[Any] = [None, None]
        if self.is_coordinator:
            try:
                answer[0] = choose()
            except Exception as error:  # noqa: BLE001 - raised on every rank below
                answer[1] = error
        with self.in_touch("deciding together"):
            dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1] is not None:
            raise answer[1]
        value: T = answer[0]
        return value

    def agree(self, what: str, label: object, prepare: Callable[[], T]) -> T:
        """Run ``prepare`` on every rank, and go on only if it succeeded on all and they are about the same thing.

        Args:
            what: for messages.
            label: what this rank is about, such as the step; must be equal everywhere.
            prepare: returns this rank's own value.

        Raises:
            CheckpointError: it failed on another rank, or labels differ.
        """
        if self.alone:
            return prepare()
        value: T | None = None
        failure: Exception | None = None
        try:
            value = prepare()
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failure = error
        reports: list[Any] = [None] * self.world_size
        with self.in_touch(what):
            dist.all_gather_object(reports, (label, describe(failure) if failure else None), group=self.group)
        if failure is not None:
            raise failure
        for rank, (other, problem) in enumerate(reports):
            if problem is not None:
                raise CheckpointError(f"{what} failed on rank {rank}: {problem}")
            if other != label:
                raise CheckpointError(f"{what}: rank {self.rank} is at {label} and rank {rank} at {other}")
        assert value is not None or failure is None
        return value  # type: ignore[return-value]

    @contextlib.contextmanager
    def in_touch(self, what: str) -> Iterator[None]:
        """Around what ranks exchange: gloo tells of a rank that has ended, or is late, in words of its own.

        Raises:
            CheckpointError: in their place; what the other ranks know or do from here on is not known.
        """
        try:
            yield
        except RuntimeError as error:
            if self.alone or isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{what}: rank {self.rank} of {self.world_size} lost touch with the others; one of them has ended, or "
                f"did not answer within {self._timeout:g} s. Look for the first rank that failed: {describe(error)}"
            ) from error


def as_checkpoint_error(error: CheckpointException, what: str) -> CheckpointError:
    """A typed error that says which rank failed and why.

    DCP raises a ``BaseException``, which ``except Exception`` does not catch, and hides the causes inside it.
    """
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    rank, cause = next(
        ((r, c) for r, c in sorted(failures.items()) if isinstance(c, CheckpointError)), min(failures.items())
    )
    others = f" ({len(failures) - 1} other ranks failed too)" if len(failures) > 1 else ""
    corrupt = all(isinstance(c, CorruptCheckpointError) for c in failures.values())
    kind = type(cause) if isinstance(cause, CheckpointError) else CheckpointError
    if isinstance(cause, CorruptCheckpointError) and not corrupt:
        kind = CheckpointError
    detail = str(cause) if isinstance(cause, CheckpointError) else describe(cause)
    return kind(f"{what} failed on rank {rank}: {detail}{others}")
