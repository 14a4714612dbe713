"""The job that runs one agent on each node: submitted by submitit, in a process of its own, and what runs in the job.

As a program it reads the order from stdin and prints the job's id. It is a process of its own because a job inherits
the environment of whoever submits it, and the caller's must not be changed for that.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["AgentTask", "main"]

_END_SECONDS = 25.0  # Slurm leaves 30 between its SIGTERM and its SIGKILL (KillWait)


@dataclass(frozen=True)
class AgentTask:
    """Runs the agent of one node, as a task of the job.

    Attributes:
        argv: the agent's command line.
    """

    argv: tuple[str, ...]

    def __call__(self) -> None:
        """Wait for the agent, and take it along when this task is asked to end."""
        with subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                process.kill()
                raise
        if code:
            raise RuntimeError(f"the agent ended with {code}")

    def checkpoint(self) -> Any:
        """What submitit runs when the job was requeued: the same, since training resumes from its own checkpoints."""
        from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - in the job only

        return DelayedSubmission(self)


def minutes(time: int | str) -> int:
    """Slurm's ways to write a time, in minutes: 90, "90", "1:30:00", "1-12", "1-12:30".

    Raises:
        ValueError: for anything else.
    """
    days, dash, rest = str(time).rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if len(parts) > 3:  # noqa: PLR2004 - hours, minutes, seconds
        raise ValueError(f"time={time!r}: it is minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    # Without days the first of two numbers is minutes; after days it is hours.
    if dash or len(parts) == 3:  # noqa: PLR2004 - as above
        hours, mins, seconds = [*parts, 0, 0][:3]
    else:
        hours, (mins, seconds) = 0, [*parts, 0][:2]
    return int(days or 0) * 24 * 60 + hours * 60 + mins + (seconds > 0)


def main() -> None:
    """Submit the job that stdin describes, and print its id."""
    order = json.load(sys.stdin)
    try:
        import cloudpickle  # noqa: PLC0415
        import submitit  # noqa: PLC0415
        from submitit.slurm import slurm  # noqa: PLC0415
    except ImportError as error:
        sys.exit(f"{error}; install 'airdata[slurm]'")
    # The job must be able to load its task on a node where this package is found in another place, or not yet.
    cloudpickle.register_pickle_by_value(sys.modules[AgentTask.__module__])
    os.umask(0o077)
    try:
        print(_submit(order, submitit.SlurmExecutor, set(inspect.signature(slurm._make_sbatch_string).parameters)))  # noqa: SLF001 - the one list of them
    except Exception as error:  # noqa: BLE001 - whatever sbatch or submitit say, the user is to read it
        sys.exit(f"{type(error).__name__}: {error}")


def _submit(order: dict[str, Any], executor_type: Any, known: set[str]) -> str:
    options = dict(order["options"])
    executor = executor_type(
        order["folder"], python=order["python"], max_num_timeout=int(options.pop("max_num_timeout", 1 << 30))
    )
    own = {name: value for name, value in options.items() if name in known}
    extra = {name: value for name, value in options.items() if name not in known}
    executor.update_parameters(
        **{"job_name": order["name"]}
        | own
        | {
            "time": minutes(own.get("time", order["minutes"])),
            "nodes": order["nodes"],
            "ntasks_per_node": 1,
            "additional_parameters": {**own.get("additional_parameters", {}), **extra},
            "srun_args": ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", *own.get("srun_args", ())],
        }
    )
    job_id: str = executor.submit(AgentTask(tuple(order["argv"]))).job_id
    return job_id
