"""A real Slurm on this machine: munged, slurmctld, and two slurmd that stand for the nodes n1 and n2.

All of it lives in one directory and on ports of its own, and ends with the test session.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
InactiveLimit=0
MinJobAge=300
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=16 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=16 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What this machine lacks for it, or ""."""
    absent = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if absent:
        return f"needs {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root, to run slurmd"


class SlurmCluster:
    """Begun by `start`, ended by `stop` however far it came."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        folder.chmod(0o755)  # munged and slurmd insist on a socket that every user can reach
        host = socket.gethostname().partition(".")[0]
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.format(host=host, folder=folder, controller=ports[0], first=ports[1], second=ports[2])
        )
        self.environ = {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        folder = self.folder
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
        )
        self._until((folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        self._until(lambda: self.ask("sinfo", "-h", "-p", "low", "-o", "%D %t").split() == ["2", "idle"], "the nodes")

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def stop(self) -> None:
        self.ask("scancel", "--user=root", "--signal=KILL")
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:  # slurmctld finishes what it is at first, and nobody needs that any more
                process.kill()
                process.wait()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.environ, "PATH": _path()},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _until(self, condition, what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come up\n{self.logs()}"
            time.sleep(0.1)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
