"""The environment of a rank: the caller's, without what belongs to another job, plus torchrun's contract.

Environments travel from process to process only; they are never written to a file, since they hold secrets.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LAUNCH_MARK", "LAUNCH_RUN_ID", "launch_environ", "rank_environ"]

LAUNCH_MARK = "AIRDIST_LAUNCH_DIR"
"""Set in every rank, to its run directory; that is how a launch inside a launch is noticed."""

LAUNCH_RUN_ID = "AIRDIST_MLFLOW_RUN_ID"
"""Names the launch's MLflow run for as long as a rank lives; MLflow takes `MLFLOW_RUN_ID` away at its first use."""

_OUTER_JOB = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
# A rank is no notebook kernel: libraries that see these talk to a front-end that does not listen to a rank, and the
# size of the caller's terminal is not the size of the stream that a rank writes to.
_FRONT_END = frozenset({"JPY_PARENT_PID", "JPY_SESSION_NAME", "PYTHONSTARTUP", "COLUMNS", "LINES"})


def launch_environ(
    environ: Mapping[str, str],
    *,
    overrides: Mapping[str, str],
    nprocs: int,
    visible: str | None,
) -> dict[str, str]:
    """What all ranks of a node share.

    Args:
        environ: the caller's environment at the time of the call.
        overrides: what the user, and then the tracking of this launch, add.
        nprocs: ranks on the node. With more than one, and unless set, each gets its share of the processors as
            `OMP_NUM_THREADS`: every rank using all of them is slower than one alone.
        visible: value for `CUDA_VISIBLE_DEVICES`, or None to leave it alone.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OUTER_JOB
        and name not in _FRONT_END
        and not name.startswith("TORCHELASTIC_")
        and not (name == "MPLBACKEND" and value.startswith("module://"))
    }
    defaults = {
        # Gloo picks the address of the host's name otherwise, which on many laptops and containers goes nowhere.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if nprocs > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, _processors() // nprocs))
    devices = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return defaults | kept | dict(overrides) | devices


def rank_environ(
    *,
    rank: int,
    nprocs: int,
    address: tuple[str, int],
    launch_dir: str,
    attempt: int,
    max_restarts: int,
    visible: str | None,
) -> dict[str, str]:
    """What tells one rank of a single node from the others: torchrun's variables, and `NODE_RANK`.

    Args:
        rank: global rank, here equal to the local one.
        nprocs: number of ranks.
        address: host and port of the store, where a socket listens already. `TORCHELASTIC_USE_AGENT_STORE` makes every
            rank's `init_process_group` a client of it.
        launch_dir: run directory.
        attempt: how often the launch was restarted.
        max_restarts: how often it may be.
        visible: devices of this rank alone, or None for those that the node shares.
    """
    host, port = address
    values: dict[str, str | int] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nprocs,
        "LOCAL_WORLD_SIZE": nprocs,
        "NODE_RANK": 0,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": nprocs,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": os.path.basename(launch_dir),
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCH_MARK: launch_dir,
    }
    if visible is not None:
        values["CUDA_VISIBLE_DEVICES"] = visible
    return {name: str(value) for name, value in values.items()}


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
