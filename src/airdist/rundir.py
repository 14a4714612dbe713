"""The run directory of one launch: where it is, and what lies where in it.

    20260131T140502Z-train-5f3a9c/     private to the user (mode 0700)
        payload.pkl                    the function and its arguments, on the way out
        results/rank-1.0.pkl           what rank 1 returned or raised in attempt 0, on the way back
        logs/rank-1.log                its complete output (rank-1.1.log and on: after a restart)
        logs/rank-1.stacks             its stacks, when the launch ran out of time
        logs/agent.log                 what the agent itself had to say, normally nothing

Payload and results are removed once a successful launch has read them; logs stay. The environment is never written
here.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RunDirectory", "run_root"]

_FILE = r"payload\.pkl|logs/rank-[\d.]+(log|stacks)|results/rank-[\d.]+pkl"


def run_root(environ: Mapping[str, str]) -> Path:
    """The directory that holds run directories: `AIRDIST_RUN_DIR`, or the user's state directory."""
    if chosen := environ.get("AIRDIST_RUN_DIR"):
        return Path(chosen).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "airdist" / "runs"


class RunDirectory(NamedTuple):
    """Knows the paths of one launch, and touches nothing but what its verbs name.

    Attributes:
        path: the directory itself, absolute.
    """

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """Make a new, empty, private run directory for a function called `name`.

        Raises:
            OSError: when `root` cannot be made or written.
        """
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        readable = re.sub(r"\W+", "-", name).strip("-")[:60] or "function"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = cls(root / f"{started}-{readable}-{os.urandom(3).hex()}")
        for path in (directory.path, directory.logs, directory._results):
            path.mkdir(mode=0o700)
        return directory

    @classmethod
    def of_node(cls, job: str, node: int) -> RunDirectory:
        """Make a run directory for the agent of one node, below the system's directory for temporary files.

        It is local, as far as the machine's owner has seen to that, so that the ranks of a node read one copy of the
        payload there; what is to last goes to the caller's own.

        Raises:
            OSError: when there is no place for it.
        """
        import tempfile  # noqa: PLC0415 - not for a launch on one machine, whose every process loads this module

        name = re.sub(r"[^\w.-]+", "-", job)
        directory = cls(Path(tempfile.mkdtemp(prefix=f"airdist-{name}-node{node}-")))
        for path in (directory.logs, directory._results):
            path.mkdir(mode=0o700)
        return directory

    def put(self, name: str, offset: int, data: bytes) -> None:
        """Write a piece of a file that comes from another machine.

        Raises:
            ValueError: for a name that is not one of those that a run directory has.
        """
        if not re.fullmatch(_FILE, name):
            raise ValueError(f"{name!r} is no file of a run directory")
        mode = "r+b" if (self.path / name).exists() else "wb"
        with (self.path / name).open(mode) as file:
            file.seek(offset)
            file.write(data)

    @property
    def payload(self) -> Path:
        """The function and its arguments."""
        return self.path / "payload.pkl"

    @property
    def logs(self) -> Path:
        """The directory of everything that a person may want to read."""
        return self.path / "logs"

    @property
    def agent_log(self) -> Path:
        """Output of the agent itself."""
        return self.logs / "agent.log"

    def log(self, rank: int, attempt: int) -> Path:
        """Complete output of a rank in an attempt."""
        return self.logs / (f"rank-{rank}.{attempt}.log" if attempt else f"rank-{rank}.log")

    def stacks(self, rank: int) -> Path:
        """Stacks of a rank, innermost call first; empty unless the launch ran out of time."""
        return self.logs / f"rank-{rank}.stacks"

    def result(self, rank: int, attempt: int) -> Path:
        """What a rank returned or raised."""
        return self._results / f"rank-{rank}.{attempt}.pkl"

    def remove_data(self) -> None:
        """Remove payload and results, which a finished launch no longer needs; logs stay."""
        self.payload.unlink(missing_ok=True)
        _remove_tree(self._results)

    def remove(self) -> None:
        """Remove everything, once the caller has it."""
        _remove_tree(self.path)

    def remove_empty_logs(self) -> None:
        """Remove what the agent and its ranks had open for the case of trouble, where there was none."""
        for path in (self.agent_log, *self.logs.glob("rank-*.stacks")):
            if path.exists() and path.stat().st_size == 0:
                path.unlink()

    @property
    def _results(self) -> Path:
        return self.path / "results"


def _remove_tree(path: Path) -> None:
    import shutil  # noqa: PLC0415 - with its compressors 4 ms, which agents and ranks need not take

    shutil.rmtree(path, ignore_errors=True)
