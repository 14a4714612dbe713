"""Numbered checkpoints under a root: save, find the newest valid one, keep the last few.

save(step, state) ──collect──► staged copy ──background thread──► dcp.save ──► publish ──► retention
restore(state)    ◄──────────── newest step that is valid, older ones if it proves damaged ◄── coordinator decides
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal

from typing_extensions import Self

from airdata.checkpoint import layout, restoring, retention
from airdata.checkpoint import state as states
from airdata.checkpoint.policies import KeepEvery, KeepLast, Policy
from airdata.checkpoint.publish import SaveSummary
from airdata.checkpoint.ranks import Ranks
from airdata.checkpoint.saving import Saver
from airdata.checkpoint.staging import Stager
from airdata.checkpoint.verify import verify_checkpoint
from airdata.checkpoint.workers import begin, claim
from airdata.errors import CheckpointError
from airdata.metrics import Reporter, active_run
from airdata.transport import open_transport
from airdata.volume import Volume

__all__ = ["CheckpointManager"]

_log = logging.getLogger(__name__)

# Local to a machine or its session, or limited to small files (/Workspace: 500 MB).
_FLEETING = re.compile(r"/(tmp|var/tmp|dev/shm|Workspace|dbfs|databricks/driver|local_disk0)(/|$)")


@functools.cache
def _warn_once(root: str) -> None:
    warnings.warn(
        f"checkpoints under {root} may not outlive this machine or session; use a volume or a bucket", stacklevel=3
    )


class CheckpointManager:
    """Saves and restores the whole state of a training job.

    ``state`` is a dict of modules (plain, DDP, FSDP2, tensor parallel), optimizers, anything with ``state_dict`` and
    ``load_state_dict`` (schedulers, the data loader), plain values and tensors. :class:`RNGState` and :class:`PerRank`
    are kept for each rank; everything else must be the same on every rank, or a DTensor::

        manager = CheckpointManager("/Volumes/main/models/run-7")
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNGState(), "epoch": 0}
        step = manager.restore(state) or 0

    With more than one rank, make the manager after ``init_process_group``, on every rank, and call ``save``,
    ``restore``, ``wait`` and ``close`` on every rank; it makes a gloo group of its own, so that an NCCL-only default
    group will do. ``steps``, ``latest`` and ``verify`` are for any rank alone.

    To the MLflow run that is active where ``save`` is called go ``checkpoint_stall_seconds`` (how long ``save`` held
    training up) and, as soon as the checkpoint is published, ``checkpoint_seconds``, ``checkpoint_bytes`` and
    ``checkpoint_gb_per_second``.

    Args:
        root: the folder that holds the steps.
        keep_last: how many valid checkpoints stay; None keeps all, whatever the other policies say.
        keep_every: checkpoints of steps that are a multiple of this stay for good.
        keep: further policies, such as ``KeepBest("loss")`` and ``Pinned([1000])``; a step stays if any keeps it.
        async_save: whether ``save`` returns when the state is copied, and writes in the background.
        prove_first: whether the first save is read back and compared with what was written, in the background, before
            it counts. A job that cannot restore should know after minutes and not after days.
        storage_options: arguments of the fsspec driver.
        verify: how ``restore`` checks what it reads; see :class:`UCVolumeReader`.
        writer_options: further arguments of :class:`UCVolumeWriter`.
        timeout: seconds after which a rank gives up waiting for the others; must exceed the longest save.

    Raises:
        VolumeError: ``root`` names no volume.
        ValueError: ``keep_last`` or ``keep_every`` is not positive.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Volume,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        *,
        keep: Sequence[Policy] = (),
        async_save: bool = True,
        prove_first: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        verify: Literal["off", "items", "files"] = "items",
        writer_options: Mapping[str, Any] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        last = [KeepLast(keep_last)] if keep_last is not None else []
        every = [KeepEvery(keep_every)] if keep_every is not None else []
        policies: list[Policy] = [*last, *every, *keep] if last else []
        self.root = Volume.of(root, storage_options)
        self._async = async_save
        self._verify: Literal["off", "items", "files"] = verify
        self._ranks = Ranks(timeout)
        self._saver = Saver(self.root, self._ranks, policies, prove=prove_first, writer_options=writer_options or {})
        self._stager = Stager()
        self._timeout = timeout
        self._pending: Future[SaveSummary] | None = None
        self._reporter: Reporter | None = None
        self._began = 0.0
        if self._ranks.is_coordinator and _FLEETING.match(self.root.directory or ""):
            _warn_once(str(self.root))

    @property
    def last_save(self) -> SaveSummary | None:
        """What the last save that succeeded did."""
        return self._saver.last

    # --- saving --------------------------------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None
    ) -> Future[SaveSummary]:
        """Save the state as ``step``; one that exists is replaced once the new one is published.

        Waits for the previous save first. Asynchronous: returns when the state is copied, and training may go on. The
        end of the program waits too, for up to the manager's ``timeout``, and logs a failure that nobody has seen.

        Args:
            step: not negative.
            state: see the class.
            metrics: what the state scored, such as ``{"loss": 0.3}``; kept with it, for ``KeepBest``.

        Returns:
            The result; done already when ``async_save`` is False. A failure is also raised by the next ``save``,
            ``wait`` or ``close``.

        Raises:
            CheckpointError: the previous save failed; this one failed (synchronous); ranks differ on the step; or
                another rank has ended, or is later than ``timeout``.
        """
        start = time.monotonic()
        name = layout.step_name(step)
        held_up = self._pending is not None and not self._pending.done()
        self.wait()
        if held_up and self._ranks.is_coordinator:
            _log.warning(
                "%s: step %d was due %.1f s after the save before it began, which took %.1f s; training waited. Save "
                "less often, or to faster storage",
                self.root,
                step,
                start - self._began,
                time.monotonic() - self._began,
            )
        self._began = start
        scores = dict(metrics or {})
        tree = self._ranks.agree(f"saving {self.root}/{name}", name, lambda: self._collect(state))
        if self._reporter is None:
            self._reporter = Reporter(rank=self._ranks.rank)
        # MLflow's active run is the calling thread's own.
        write = functools.partial(self._write, step, tree, scores, self._reporter, active_run())
        if self._async:
            self._pending = future = begin(write, f"saving step {step} under {self.root}", self._timeout)
        else:
            future = Future()
            future.set_result(write())
        self._reporter.put("checkpoint_stall_seconds", time.monotonic() - start)
        return future

    def wait(self) -> None:
        """Return when nothing is being saved.

        Raises:
            CheckpointError: the last save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            claim(pending)

    def close(self) -> None:
        """Wait, and give back buffers; the manager can be used again.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._stager.close()
            if self._reporter is not None:
                self._reporter.close()
                self._reporter = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # the error on its way is the one to see

    def _collect(self, state: Mapping[str, Any]) -> dict[str, Any]:
        tree = states.collect(state, self._ranks.rank)
        return self._stager.stage(tree) if self._async else tree

    def _write(
        self, step: int, tree: dict[str, Any], scores: Mapping[str, float], reporter: Reporter, run: str | None
    ) -> SaveSummary:
        summary = self._saver.write(step, tree, scores)
        if run is not None:
            reporter.put("checkpoint_seconds", summary.seconds, run)
            reporter.put("checkpoint_bytes", summary.bytes, run)
            reporter.put("checkpoint_gb_per_second", summary.gb_per_second, run)
        return summary

    # --- restoring -----------------------------------------------------------------------------------------------

    def restore(self, state: MutableMapping[str, Any], step: int | None = None) -> int | None:
        """Load the newest valid checkpoint into the objects of ``state``; plain values are replaced in it.

        A checkpoint that proves damaged is skipped, with the reason in the log, and the one before it is loaded whole.

        Args:
            state: objects to load into.
            step: load this step and no other.

        Returns:
            Its step; None when no checkpoint is published under the root.

        Raises:
            CheckpointNotFoundError: ``step`` is not published.
            CorruptCheckpointError: there are checkpoints, and none is valid; ``state`` may hold parts of one.
            CheckpointError: the newest valid one does not fit ``state``, or storage failed.
        """
        self.wait()
        if step is not None:
            return restoring.load_step(self.root, self._ranks, step, state, self._verify)
        return restoring.restore(self.root, self._ranks, state, self._verify)

    # --- looking -------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The published steps, ascending."""
        return retention.published_steps(self.root)

    def latest(self) -> int | None:
        """The newest step whose files are all there with their sizes; None when there is none."""
        found, _ = restoring.newest_valid(self.root)
        return found[0] if found else None

    def verify(self, step: int) -> None:
        """Read every byte of a step and compare it with the digests of its save.

        Raises:
            CheckpointNotFoundError: the step is not published.
            CorruptCheckpointError: something is missing or differs; names the file.
        """
        verify_checkpoint(open_transport(self.root.child(layout.step_name(step))))
