"""Slurm: inside an allocation one task of `srun` on each node, outside of any a job of submitit's that does the same.

    SLURM_JOB_ID is set   srun --nodes=N --ntasks-per-node=1 --kill-on-bad-exit … agent
    it is not             submitit: sbatch (partition, time, account, …) whose srun runs … agent

Agents know their node by `SLURM_PROCID`. The environment of `srun` and of the job is the caller's, without what looks
like a secret, and with the secret of the launch, which Slurm keeps as it keeps every job's environment.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from airdist import processes
from airdist.engines.remote import COMMON_OPTIONS, RemoteEngine
from airdist.environ import carried
from airdist.errors import LaunchError
from airdist.failure import tail
from airdist.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airdist.engines.remote import AgentCommand, Spawned

__all__ = ["SlurmEngine"]

_NODE = "SLURM_PROCID"
_ASK_SECONDS = 1.0  # between two questions to the controller
_ANSWER_SECONDS = 30.0
_SUBMIT_SECONDS = 120.0
_REQUEUE_SECONDS = 60.0  # for the controller to make up its mind after a node or a job was taken away
_DAY_SECONDS = 24 * 3600.0
_SPARE_MINUTES = 10  # of the job beyond the launch, which is to end first and say why
_QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED"})
_RUNNING = frozenset({"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"})


class SlurmEngine(RemoteEngine):
    """Starts agents in the allocation around this process, or in a job of their own."""

    name: ClassVar[str] = "slurm"
    keys: ClassVar[frozenset[str] | None] = None  # whatever sbatch knows

    def check(self, *, nodes: int, options: Mapping[str, Any]) -> None:
        """Refuse more nodes than the allocation has, and options that an allocation that exists cannot take."""
        if shutil.which("srun") is None:
            raise LaunchError(
                "engine='slurm' needs srun, and there is none in PATH: this is no machine of a Slurm cluster"
            )
        if "SLURM_JOB_ID" not in os.environ:
            return
        there = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
        if nodes > there:
            raise LaunchError(f"nodes={nodes}, but the allocation {os.environ['SLURM_JOB_ID']} has {there}")
        if unknown := sorted(set(options) - COMMON_OPTIONS):
            raise LaunchError(
                f"engine_options: {', '.join(unknown)}: this process is in the allocation {os.environ['SLURM_JOB_ID']} "
                f"that has its shape already; what can be set here is {', '.join(sorted(COMMON_OPTIONS))}"
            )

    def spawn(self, command: AgentCommand) -> Spawned:
        """Start one task for each node, or submit the job that will."""
        return _Step(command) if "SLURM_JOB_ID" in os.environ else _Job(command)


def _environ(command: AgentCommand) -> dict[str, str]:
    _, withheld = carried(os.environ)
    return {name: value for name, value in os.environ.items() if name not in withheld} | command.environ()


class _Step:
    """A job step in the allocation that this process is in."""

    def __init__(self, command: AgentCommand) -> None:
        self._command = command
        self._log = RunDirectory(command.directory).agent_log
        self._start()

    def _start(self) -> None:
        nodes = self._command.nodes
        shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        # Overlap: a notebook or a script in the allocation may itself be a step that holds its processors. An agent's
        # ranks use what its node has, and PMI is for programs that ask for it.
        manners = ["--overlap", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", "--unbuffered", "--label"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["srun", *shape, *manners, "--export=ALL", "--input=none", *self._command.argv(_NODE)],
                env=_without_limits(_environ(self._command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def job_id(self) -> str:
        """The allocation's."""
        return os.environ["SLURM_JOB_ID"]

    def state(self) -> str:
        """Of `srun`, which ends with its tasks."""
        return "running" if self._process.poll() is None else "ended"

    def words(self) -> str:
        """The end of what `srun` and the agents have printed."""
        return "; ".join(tail(self._log))

    def again(self) -> bool:
        """Start another step, if the allocation is still there."""
        self.close(_REQUEUE_SECONDS)
        if _job(self.job_id).get("JobState") != "RUNNING":
            return False
        self._start()
        return True

    def close(self, seconds: float) -> None:
        """Wait for the step; SIGTERM, and soon SIGKILL, end it: `srun` passes both on."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
                return


class _Job:
    """A job that submitit has submitted."""

    def __init__(self, command: AgentCommand) -> None:
        self._command = command
        self._folder = command.directory / "slurm"
        self._asked = 0.0
        self._state = "queued"
        self._restarts = 0
        order = {
            "folder": str(self._folder),
            "argv": command.argv(_NODE),
            "nodes": command.nodes,
            "python": command.python,
            "name": command.job,
            "options": dict(command.options),
            "minutes": math.ceil((command.timeout or _DAY_SECONDS) / 60) + _SPARE_MINUTES,
        }
        done = subprocess.run(
            [sys.executable, *processes.program("airdist.engines.slurm_job")],
            input=json.dumps(order),
            env=_environ(command),
            capture_output=True,
            text=True,
            timeout=_SUBMIT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise LaunchError(f"the job could not be submitted: {done.stderr.strip()[-2000:]}")
        self._id = done.stdout.split()[-1]

    @property
    def job_id(self) -> str:
        """Slurm's."""
        return self._id

    def state(self) -> str:
        """As the controller last said."""
        if time.monotonic() - self._asked >= _ASK_SECONDS:
            state = _job(self._id).get("JobState")
            if state is not None:
                known = "queued" if state in _QUEUED else "running" if state in _RUNNING else "ended"
                self._state = known
            self._asked = time.monotonic()
        return self._state

    def words(self) -> str:
        """What the controller says of the job, and the end of what its tasks have printed."""
        job = _job(self._id)
        said = [f"job {self._id}: {job.get('JobState', 'unknown')} {job.get('Reason', '')}".rstrip()]
        for path in sorted(self._folder.glob(f"{self._id}_*_log.*")):
            said += tail(path)[-3:]
        return "; ".join(said)

    def again(self) -> bool:
        """Whether the job has been requeued, so that its agents will call once more."""
        deadline = time.monotonic() + _REQUEUE_SECONDS
        while time.monotonic() < deadline:
            job = _job(self._id)
            restarts, state = int(job.get("Restarts", 0)), job.get("JobState", "unknown")
            # A job that was requeued shows for a moment how the processes end that were taken away: COMPLETING, FAILED.
            if restarts > self._restarts and state in (_QUEUED | _RUNNING) - {"COMPLETING"}:
                self._restarts, self._state = restarts, "queued"
                return True
            if job and restarts == self._restarts and state not in _QUEUED | _RUNNING | {"PREEMPTED"}:
                return False
            if state == "CANCELLED":
                return False
            time.sleep(0.2)
        return False

    def close(self, seconds: float) -> None:
        """Wait for the job to end, and cancel it if it is not known to have ended."""
        deadline = time.monotonic() + seconds
        while (state := _job(self._id).get("JobState")) is None or state in _QUEUED | _RUNNING:
            if time.monotonic() >= deadline or state in _QUEUED:
                _ask("scancel", self._id)
                return
            time.sleep(0.2)


def _without_limits(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what the batch script's own shape would impose on our step."""
    imposed = re.compile(r"SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK|DISTRIBUTION|CPU_BIND.*)$")
    return {name: value for name, value in environ.items() if not imposed.match(name)}


def _job(job_id: str) -> dict[str, str]:
    """What the controller knows of a job, by field; empty if it does not know it or does not answer."""
    text = _ask("scontrol", "--oneliner", "show", "job", job_id)
    return dict(re.findall(r"(JobState|Reason|Restarts)=(\S*)", text))


def _ask(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
        return done.stdout
    return ""
