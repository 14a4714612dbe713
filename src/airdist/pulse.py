"""Whether the other end of a link still lives: both ends speak at least so often, and silence is counted.

A connection that is closed says so at once. A machine that froze, a cable that was pulled or an agent that was stopped
says nothing; only its silence does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airdist.channel import Channel

__all__ = ["Pulse"]

_MOST_AT_ONCE = 1.0


class Pulse:
    """Counts the silence of one channel, and keeps this end from being silent itself.

    Args:
        channel: the link.
        limit: seconds of silence after which the other end counts as lost.
    """

    def __init__(self, channel: Channel, limit: float) -> None:
        self._channel = channel
        self._limit = limit
        self._heard = channel.heard
        self._quiet = 0.0
        self._counted = self._sent = time.monotonic()

    def beat(self) -> None:
        """Say something if this end has been silent for a while."""
        now = time.monotonic()
        if now - self._sent >= self._limit / 4:
            self._sent = now
            self._channel.send("beat")

    def lost(self) -> bool:
        """Whether the other end has been silent for too long. Ask often: time between two questions counts little.

        A process that was suspended itself would otherwise take what it slept through for the others' silence.
        """
        now = time.monotonic()
        if self._channel.heard != self._heard:
            self._heard, self._quiet = self._channel.heard, 0.0
        else:
            self._quiet += min(now - self._counted, _MOST_AT_ONCE)
        self._counted = now
        return self._channel.closed or self._quiet > self._limit
