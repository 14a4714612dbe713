"""What a launch shows: lines of ranks and notes of its own, put in by one thread and displayed by the one that waits.

the listening thread ── put, note ──► a bounded backlog ── show_until ──► the cell or terminal
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from typing import TYPE_CHECKING

from airdist.logs import Console, columns, redraws, show

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airdist.logs import LogMode, Piece

__all__ = ["Display"]

logger = logging.getLogger("airdist")

_BACKLOG_BYTES = 8 << 20  # output that the displaying thread has not taken; more is shown only by the files
_REDRAW_SECONDS = 0.2


class Display:
    """The output of one launch on its way to whoever watches.

    Args:
        on: whether anybody is going to watch.
        mode: what of it is shown, the launch's `logs`.
        logs: where all of it is.
    """

    def __init__(self, *, on: bool, mode: LogMode, logs: Path) -> None:
        self.on = on and mode != "none"
        self._mode = mode
        self._logs = logs
        self._events: queue.SimpleQueue[tuple[int, int, bytes] | str | None] = queue.SimpleQueue()
        self._backlog = 0
        self._dropped = 0

    def put(self, rank: int, stream: int, data: bytes) -> None:
        """Output of a rank."""
        if self._backlog > _BACKLOG_BYTES:
            self._dropped += len(data)
        else:
            self._backlog += len(data)
            self._events.put((rank, stream, data))

    def note(self, text: str, *, warn: bool = False) -> None:
        """A line of the launch's own; a warning reaches the log where nobody watches."""
        if self.on:
            self._events.put(text)
        elif warn:
            logger.warning(text)

    def wake(self) -> None:
        """Let the displaying thread see at once that the launch has ended."""
        self._events.put(None)

    def console(self, world_size: int | None) -> Console:
        """What is displayed on; one for the whole launch, whatever interrupts the displaying."""
        live = redraws(sys.stdout) or redraws(sys.stderr)
        return Console(world_size, self._mode, live=live, columns=columns())

    def show_until(self, ended: Callable[[], bool], console: Console) -> None:
        """Display what comes until the launch has ended and all of it has been shown."""
        while not (ended() and self._events.empty()):
            pieces: list[Piece] = []
            try:
                event = self._events.get(timeout=_REDRAW_SECONDS)
            except queue.Empty:
                event = None
            if isinstance(event, str):
                pieces += console.note(event)
            elif event is not None:
                self._backlog -= len(event[2])
                pieces += console.feed(*event)
            show([*pieces, *console.tick(time.monotonic())])
        show(console.close())
        show(self._closing_notes(console))

    def _closing_notes(self, console: Console) -> list[Piece]:
        pieces: list[Piece] = []
        if console.hidden_lines:
            pieces += console.note(
                f"{console.hidden_lines} lines of other ranks not shown (logs='all' shows them): {self._logs}"
            )
        if self._dropped:
            pieces += console.note(f"{self._dropped} bytes of output came too fast to show; they are in {self._logs}")
        return pieces
