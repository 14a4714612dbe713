"""The Spark side of a launch: the function of one barrier task, which holds the agent of one node.

It travels by value, with `airdist.engines.held`, so that the executors' own packages decide nothing before the agent
runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from airdist.engines.held import hold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["run_agent"]

# What Spark tells its own worker, and nobody means for a rank: OpenMP gets the rank's share of the processors, and hash
# seeds are a thing between workers.
_WORKERS_OWN = frozenset({"OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHON_WORKER_FACTORY_SECRET"})


def run_agent(
    agents: Iterator[Sequence[str]], environ: Mapping[str, str], any_python: str | None
) -> list[tuple[int, int, str]]:
    """Run the agent of this partition's node to its end.

    Args:
        agents: the command line of one agent, under a tether. When Spark ends the task, it kills this process.
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
    # In a session of its own: Spark's daemon hangs up on its whole process group when the executor is gone.
    code, words = hold(argv, {**own, **environ}, any_python, start_new_session=True)
    return [(context.partitionId(), code, words)]
