"""The one MLflow run of a world that somebody else has started: rank 0 makes it, and all ranks log to it.

The ranks need to know it before the function begins, when there is no process group yet. They share it through a
store: that of torchrun's agent where it is there, else one that rank 0 opens beside the user's, on the port after
`MASTER_PORT`. Only the run's id travels: where MLflow is, and who may log there, each rank knows from its environment.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airdist.environ import LAUNCH_RUN_ID
from airdist.tracking.rank import flush_rank, prepare_rank
from airdist.tracking.run import end_run, start_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airdist.tracking.run import LaunchRun

__all__ = ["tracked"]

logger = logging.getLogger("airdist")

_WAIT = timedelta(seconds=90)  # for rank 0 to make the run: a server may take 10 s, a new local database 60
_LAST_WORDS = timedelta(seconds=60)  # for the other ranks to be done too, once rank 0 is
_calls = itertools.count()
"""Every rank makes the same calls in the same order."""
_stores: list[Any] = []
"""The one store, once it is needed; others may read it for as long as this process lives."""


@contextlib.contextmanager
def tracked(name: str, params: Mapping[str, object], *, rank: int, world_size: int) -> Iterator[None]:
    """Have what the body logs land in the run of this launch, and end the run with it.

    Args:
        name: name of the run.
        params: its parameters.
        rank: global rank of this process; 0 makes the run, and ends it once all are done.
        world_size: number of ranks.
    """
    run = start_run(name=name, params=params, tags={"world_size": str(world_size)}) if rank == 0 else None
    board = _Board(rank, world_size)
    found = board.share(run)
    if not found:
        yield
        return
    before = {key: os.environ.get(key) for key in (*found, "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING")}
    os.environ.update(found)
    release = prepare_rank()
    failed = True
    try:
        yield
        failed = False
    finally:
        flush_rank(failed=failed)
        release()
        board.leave(wait=not failed)
        if run is not None:
            run.finish("FAILED" if failed else "FINISHED")
        elif failed:
            # The outer launcher is about to end rank 0, which then cannot say it itself.
            end_run(found[LAUNCH_RUN_ID], "FAILED")
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


class _Board:
    """Where the ranks of one call leave word for each other; without a way to do so, it does nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._alone = world_size == 1 or not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
        self._key = f"airdist/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"

    def share(self, run: LaunchRun | None) -> dict[str, str]:
        """The variables that name the run of rank 0, on all ranks; none where there is no run or no way to tell."""
        own = (
            {name: value for name, value in run.env().items() if not name.startswith("MLFLOW_TRACKING")} if run else {}
        )
        if not self._alone:
            try:
                store = _store(self._rank)
                if self._rank == 0:
                    store.set(self._key, json.dumps(own))
                else:
                    own = json.loads(store.get(self._key))
            except Exception as error:  # noqa: BLE001 - tracking trouble never stops training
                self._alone = True
                words = str(error).partition("\n")[0]
                logger.warning("rank %d shares no MLflow run with the others: %s", self._rank, words)
        return own

    def leave(self, *, wait: bool) -> None:
        """Say that this rank is done; on rank 0, wait for the others: logging to an ended run makes it run again."""
        if self._alone:
            return
        with contextlib.suppress(Exception):
            store = _store(self._rank)
            store.set(f"{self._key}/{self._rank}", "done")
            if self._rank == 0 and wait:
                store.wait([f"{self._key}/{rank}" for rank in range(self._world_size)], _LAST_WORDS)


def _store(rank: int) -> Any:
    if not _stores:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + (0 if agent else 1)
        distributed = importlib.import_module("torch.distributed")  # a rank has it, or is about to
        master = rank == 0 and not agent
        _stores.append(distributed.TCPStore(address, port, is_master=master, timeout=_WAIT, wait_for_workers=False))
    return _stores[0]
