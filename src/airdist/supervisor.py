"""What every agent does, whether it leads or follows: serve a node's ranks and an owner, and end the ranks for good."""

from __future__ import annotations

import os
import selectors
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airdist import processes
from airdist.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airdist.channel import Channel
    from airdist.mirror import Mirror
    from airdist.rundir import RunDirectory
    from airdist.spec import AgentSpec

__all__ = ["ORPHAN_GRACE_SECONDS", "TICK_SECONDS", "Supervisor"]

TICK_SECONDS = 0.5
ORPHAN_GRACE_SECONDS = 2.0  # nobody waits for the ranks any more
_REAP_SECONDS = 5.0  # a process in uninterruptible sleep does not die of SIGKILL; it is named and left


class Supervisor:
    """A single-threaded agent around one selector.

    Args:
        spec: what to run; its `nprocs` is known by now.
        owner: the channel to the caller or to the leader; it does not block.
        directory: run directory on this machine.
        environ: environment of the ranks.
        mirror: sends the files of the run directory to the owner, where the owner is on another machine.
    """

    def __init__(
        self,
        spec: AgentSpec,
        owner: Channel,
        directory: RunDirectory,
        environ: Mapping[str, str],
        mirror: Mirror | None = None,
    ) -> None:
        self._spec = spec
        self._owner = owner
        self._directory = directory
        self._mirror = mirror
        self._selector = selectors.DefaultSelector()
        self._node = Node(spec, directory, environ, self._selector, owner)
        self._abandoned = False

    def take(self, message: dict[str, Any]) -> None:
        """Do what the owner says."""
        raise NotImplementedError

    def _on_terminate(self) -> None:
        """This process has been asked to end."""
        raise NotImplementedError

    def _serve(self) -> None:
        """Do what is due at every turn of the loop."""
        if self._mirror is not None:
            self._mirror.pump()

    def _on_owner_lost(self) -> None:
        self._abandoned = True

    def _pump(self, until: Callable[[], object], seconds: float | None) -> None:
        """Serve everything that happens until a condition holds or a time has passed (None: no limit)."""
        end = None if seconds is None else time.monotonic() + seconds
        while not until():
            wait = TICK_SECONDS if end is None else min(TICK_SECONDS, end - time.monotonic())
            if wait <= 0:
                return
            self._serve()
            if not self._owner.closed:
                write = selectors.EVENT_WRITE if self._owner.pending else 0
                self._selector.modify(self._owner, selectors.EVENT_READ | write, self._on_owner)
            for key, _ in self._selector.select(wait):
                if key.fileobj in self._selector.get_map():  # not closed by an earlier one of this round
                    key.data()
            # A process that the caller forked holds a copy of its end, so the end of the channel alone may never come.
            if self._spec.owner is not None and os.getppid() != self._spec.owner:
                self._lose_owner()

    def _watch(self) -> None:
        """Make the owner, the end of a child and a request to end wake the selector."""
        self._selector.register(self._owner, selectors.EVENT_READ, self._on_owner)
        awake, wake = os.pipe()
        for end in (awake, wake):
            os.set_blocking(end, False)

        def on_wake() -> None:
            with suppress(BlockingIOError):
                while os.read(awake, 1 << 10):
                    pass
            self._node.reap()

        signal.signal(signal.SIGTERM, lambda *_: self._on_terminate())
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            # A handler that does nothing, and not SIG_IGN, which the ranks would inherit.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(awake, selectors.EVENT_READ, on_wake)

    def _on_owner(self) -> None:
        self._owner.flush()
        for message in self._owner.receive():
            self.take(message)
        if self._owner.closed:
            self._lose_owner()

    def _lose_owner(self) -> None:
        if self._owner in self._selector.get_map():
            self._selector.unregister(self._owner)
        self._owner.closed = True
        self._on_owner_lost()

    def _clear(self) -> list[int]:
        """End whatever is left of the ranks and what they started; return the pids that withstood."""
        deadline = time.monotonic() + _REAP_SECONDS
        # Ending a parent may bring forth an orphan that is ours from then on, so look until there is none.
        while (left := self._node.family()) and time.monotonic() < deadline:
            processes.kill(left)
            self._pump(lambda: not self._node.family(), 0.05)
        self._pump(lambda: self._node.gone, max(0.0, deadline - time.monotonic()))
        self._node.close()
        return left

    def _follow_logs(self, attempt: int) -> None:
        """Have the owner get the files of this attempt, where it does not share them."""
        if self._mirror is not None:
            for rank in self._node.ranks:
                self._mirror.follow(self._directory.log(rank.rank, attempt))
                self._mirror.follow(self._directory.stacks(rank.rank))
                self._mirror.follow(self._directory.result(rank.rank, attempt))

    def _deliver(self) -> None:
        """Wait until the owner has taken everything that it is to get, or is gone."""

        def delivered() -> bool:
            return self._owner.closed or not (self._owner.pending or (self._mirror and not self._mirror.done()))

        self._pump(delivered, None)
