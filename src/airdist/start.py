"""From the call to the start of the agents: all that comes before a launch is under way.

call ── plan ──► agents ──► what a launch under way needs is imported while they start ──► Launch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from airdist.display import Display
from airdist.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.engines.base import Agents
    from airdist.launch import Launch
    from airdist.plan import Plan
    from airdist.settings import Settings

__all__ = ["start_launch"]

R = TypeVar("R")

_GIVE_UP_SECONDS = 5.0


def start_launch(
    function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, *, display: bool
) -> Launch[R]:
    """Start the ranks of one launch.

    Args:
        function: what every rank calls.
        args: its positional arguments, the same for every rank.
        kwargs: its keyword arguments.
        settings: how to launch it.
        display: whether the caller is going to show output as it comes, by `Launch.watch`.

    Raises:
        AirdistError: what `airdist.plan.make_plan` raises, before any process exists.
    """
    plan = make_plan(function, args, kwargs, settings)
    shown = Display(on=display, mode=settings.logs, logs=plan.directory.logs)
    try:
        agents = plan.engine.start(plan.order(forward_logs=shown.on))
        return _follow(plan, agents, shown)
    except BaseException:
        if plan.run is not None:
            plan.run.finish("FAILED")
        raise


def _follow(plan: Plan, agents: Agents, display: Display) -> Launch[Any]:
    """Hand the agents over to a launch; an interrupt on the way, which may take 20 ms, must not leave them alone."""
    try:
        from airdist.launch import Launch  # noqa: PLC0415 - here it costs nothing: an agent takes longer to start

        return Launch(plan, agents, display)
    except BaseException:
        if agents.channel is not None:
            agents.channel.close()  # an agent ends its ranks when its caller has hung up
        agents.close(_GIVE_UP_SECONDS)
        raise
