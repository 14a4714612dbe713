"""The environment of a rank: the caller's, without what belongs to another job, plus torchrun's contract.

Environments travel from process to process only; they are never written to a file, since they hold secrets.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.world import Place

__all__ = [
    "LAUNCH_MARK",
    "LAUNCH_RUN_ID",
    "LOOPBACK",
    "SECRET",
    "carried",
    "launch_environ",
    "network_defaults",
    "rank_environ",
]

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

LAUNCH_MARK = "AIRDIST_LAUNCH_DIR"
"""Set in every rank, to its run directory; that is how a launch inside a launch is noticed."""

LAUNCH_RUN_ID = "AIRDIST_MLFLOW_RUN_ID"
"""Names the launch's MLflow run for as long as a rank lives; MLflow takes `MLFLOW_RUN_ID` away at its first use."""

SECRET = "AIRDIST_SECRET"  # noqa: S105 - the variable's name
"""How the secret of a launch on several machines reaches their agents; a rank never sees it."""

_OUTER_JOB = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
# A rank is no notebook kernel: libraries that see these talk to a front-end that does not listen to a rank, and the
# size of the caller's terminal is not the size of the stream that a rank writes to.
_FRONT_END = frozenset({"JPY_PARENT_PID", "JPY_SESSION_NAME", "PYTHONSTARTUP", "COLUMNS", "LINES"})


# What describes one machine, login or job there, and would be wrong on another.
_HOST = frozenset({
    "HOME", "HOST", "HOSTNAME", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "MAIL", "OLDPWD", "PATH", "PWD",
    "PYTHONHOME", "SHELL", "SHLVL", "TERM", "TMPDIR", "TEMP", "TMP", "TZ", "USER", "VIRTUAL_ENV", "XAUTHORITY", "_",
    "DISPLAY", "JAVA_HOME", "JPY_API_TOKEN", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "AIRDIST_RUN_DIR",
    "AIRDIST_ADDRESS", "AIRDIST_ENGINE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
})  # fmt: skip
_HOST_PREFIXES = (
    "BASH_", "CONDA_", "DBUS_", "KUBERNETES_", "LC_", "OMPI_", "PMI", "PMIX_", "PRTE_", "RAY_", "SBATCH_", "SLURM",
    "SPARK_", "SRUN_", "SSH_", "SUBMITIT_", "SUDO_", "SYSTEMD_", "TERM_", "TMUX", "VSCODE_", "XDG_",
)  # fmt: skip
# Compiled at its use: every agent and rank imports this module, and asks it for other things.
_WITHHELD = (
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|COOKIE|CONNECTION_STRING|(^|_)(TOKENS?|PAT|AUTH|DSN)(_|$)"
    r"|(API|ACCESS|ACCOUNT|AUTH|PRIVATE|ENCRYPTION|SAS|SIGNING)_?KEY"
)
# Frameworks that find these take the agent's place in its job step for the rank's in the world.
_STEP = frozenset({
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID",
    "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
})  # fmt: skip


def carried(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Which variables of the caller go to other machines, and the names of those that look like secrets and stay.

    What describes this machine, this login or the job that the caller itself runs in stays without a word.
    """
    kept = {name: value for name, value in environ.items() if name not in _HOST and not name.startswith(_HOST_PREFIXES)}
    withheld = sorted(name for name in kept if re.search(_WITHHELD, name, re.IGNORECASE))
    return {name: value for name, value in kept.items() if name not in withheld and name != SECRET}, withheld


def launch_environ(
    environ: Mapping[str, str],
    *,
    overrides: Mapping[str, str],
    nprocs: int,
    visible: str | None,
    interface: str | None = None,
    step: bool = False,
) -> dict[str, str]:
    """What all ranks of a node share.

    Args:
        environ: the caller's environment at the time of the call.
        overrides: what the user, and then the tracking of this launch, add.
        nprocs: ranks on the node. With more than one, and unless set, each gets its share of the processors as
            `OMP_NUM_THREADS`: every rank using all of them is slower than one alone.
        visible: value for `CUDA_VISIBLE_DEVICES`, or None to leave it alone.
        interface: network interface that leads to the other nodes; None: there are none, or it is not known.
        step: whether the agent is a task of a scheduler's, whose place there is not a rank's.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OUTER_JOB
        and name not in _FRONT_END
        and name != SECRET
        and not (step and name in _STEP)
        and not name.startswith("TORCHELASTIC_")
        and not (name == "MPLBACKEND" and value.startswith("module://"))
    }
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if nprocs > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, _processors() // nprocs))
    devices = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return defaults | network_defaults(interface) | kept | dict(overrides) | devices


def network_defaults(interface: str | None) -> dict[str, str]:
    """How the libraries of a rank are told which interface leads to the other ranks, where the user has not said it.

    Gloo picks the address of the host's name otherwise, which on many laptops and containers goes nowhere.
    """
    if interface is None:
        return {}
    gloo = {"GLOO_SOCKET_IFNAME": interface}
    return gloo if interface == LOOPBACK else gloo | {"NCCL_SOCKET_IFNAME": f"={interface}"}


def rank_environ(
    *, local_rank: int, nprocs: int, place: Place, launch_dir: str, job: str, max_restarts: int, visible: str | None
) -> dict[str, str]:
    """What tells one rank from the others: torchrun's variables, and `NODE_RANK`.

    Args:
        local_rank: rank on its node.
        nprocs: ranks of its node.
        place: where the node stands in the world. `TORCHELASTIC_USE_AGENT_STORE` makes every rank's
            `init_process_group` a client of the store at its address, where a socket listens already.
        launch_dir: run directory on this node.
        job: name of the launch, the same everywhere.
        max_restarts: how often the launch may be restarted.
        visible: devices of this rank alone, or None for those that the node shares.
    """
    rank = place.first + local_rank
    host, port = place.address
    values: dict[str, str | int] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": nprocs,
        "NODE_RANK": place.node,
        "GROUP_RANK": place.node,
        "GROUP_WORLD_SIZE": place.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": place.attempt,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCH_MARK: launch_dir,
    }
    if visible is not None:
        values["CUDA_VISIBLE_DEVICES"] = visible
    return {name: str(value) for name, value in values.items()}


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
