"""The Spark side of a launch: the function of one barrier task, which holds the agent of one node.

It travels by value, so that the executors' own packages decide nothing before the agent runs, and imports the standard
library and Spark only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["run_agent"]

_TAIL_BYTES = 2000
# What Spark tells its own worker, and nobody means for a rank: OpenMP gets the rank's share of the processors, and hash
# seeds are a thing between workers.
_WORKERS_OWN = frozenset({"OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHON_WORKER_FACTORY_SECRET"})


def run_agent(
    agents: Iterator[Sequence[str]], environ: Mapping[str, str], any_python: str | None
) -> list[tuple[int, int, str]]:
    """Run the agent of this partition's node to its end.

    Args:
        agents: the command line of one agent, under a tether whose stdin is a pipe that this process holds: when Spark
            ends the task, it kills this process, and the tether asks the agent to end.
        environ: what goes into its environment; it holds the secret.
        any_python: interpreter in the command line in whose place the worker's own may stand.

    Returns:
        Rank of the node, exit code of the agent and end of its output. A failure is a value too: Spark would start a
        stage that has failed again by itself, which is for the caller to decide.
    """
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - Spark's workers have it, whoever imports this need not

    context = BarrierTaskContext.get()
    (argv,) = agents
    own = {name: value for name, value in os.environ.items() if name not in _WORKERS_OWN}
    if (gpus := context.resources().get("gpu")) is not None:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    output: deque[int] = deque(maxlen=_TAIL_BYTES)
    process = subprocess.Popen(
        [sys.executable if part == any_python else part for part in argv],
        env={**own, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Spark's daemon hangs up on its whole process group when the executor is gone
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while data := os.read(process.stdout.fileno(), 1 << 12):
            output.extend(data)
    finally:
        process.stdin.close()  # the tether
        process.wait()
        process.stdout.close()
    return [(context.partitionId(), process.returncode, bytes(output).decode(errors="replace").strip())]
