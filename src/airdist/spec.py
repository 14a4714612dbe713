"""What the agents of a launch are asked to run, as the caller writes it and an agent reads it.

The values of an agent are named tuples and plain classes: `dataclasses`, which imports `inspect`, would be a quarter of
the time that an agent takes to start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["AgentSpec", "spec_of"]


class AgentSpec(NamedTuple):
    """What the agents of a launch are asked to run.

    Attributes:
        run_dir: run directory, which holds the payload; on another machine than the caller's the agent makes one.
        nprocs: ranks to start on this node; None: as many as `request` gives.
        cwd: working directory of the ranks.
        job: name of the launch; "": that of its run directory.
        timeout: seconds from now, over all attempts, or None.
        grace: seconds between asking a rank to end and ending it; None: 10, and 2 after a rank's failure.
        max_restarts: attempts beyond the first.
        attempt: number of the first attempt.
        visible: `CUDA_VISIBLE_DEVICES` of each rank, or None where the ranks share the node's.
        forward_logs: whether the owner wants to see output as it comes.
        owner: pid of the owner where it is this process's parent (the engine knows).
        nodes: number of nodes.
        start_timeout: seconds for all nodes to come together.
        heartbeat: seconds of silence after which a node counts as lost.
        remote: for agents on other machines what they find out or make there themselves; see `airdist.arrival`.
    """

    run_dir: str
    nprocs: int | None
    cwd: str
    job: str = ""
    timeout: float | None = None
    grace: float | None = None
    max_restarts: int = 0
    attempt: int = 0
    visible: list[str] | None = None
    forward_logs: bool = True
    owner: int | None = None
    nodes: int = 1
    start_timeout: float = 300.0
    heartbeat: float = 30.0
    remote: dict[str, Any] | None = None


def spec_of(message: dict[str, Any]) -> AgentSpec:
    """The spec in a message of kind `spec`."""
    return AgentSpec(**{key: value for key, value in message.items() if key != "kind"})
