"""Output of ranks on its way to a person: bytes in, prefixed lines and one calm progress bar out.

`Console` is pure: it is fed bytes and a time and returns what to write. `show` writes it. Both run in the thread that
called `.distributed()`, because a notebook puts what other threads write under whichever cell is current
(ipython/ipykernel#1199).
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Literal, TextIO

from airdist.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LOG_MODES", "Console", "LogMode", "Piece", "columns", "redraws", "show"]

LogMode = Literal["default", "all", "rank0", "none"]
LOG_MODES: tuple[LogMode, ...] = ("default", "all", "rank0", "none")

STDOUT, STDERR = 1, 2
_REDRAW_SECONDS = 0.2
_NOTEBOOK_COLUMNS = 160

Piece = tuple[int, str]
"""A stream (1 or 2) and the text to write to it."""


class Console:
    """Turns the bytes of many ranks into readable lines.

    A progress bar redraws itself with carriage returns. Of each line only the last state counts; of the bars that are
    being drawn, those of the lowest rank are shown, side by side in one line, at most five times a second; the final
    state of a bar that stays is an ordinary line.

    Args:
        world_size: number of ranks, or None while it is not known; a single one needs no prefix.
        mode: "all": everything; "default": rank 0, and what the others write to stderr; "rank0"; "none".
        live: whether the place of display understands a carriage return; elsewhere only final states appear.
        columns: width of that place. A carriage return does not take back a line that was wrapped, so bars are cut.
    """

    def __init__(
        self, world_size: int | None, mode: LogMode = "default", *, live: bool = True, columns: int = _NOTEBOOK_COLUMNS
    ) -> None:
        self._world_size = world_size
        self._mode = mode
        self._live = live
        self._columns = columns
        self._screens: dict[tuple[int, int], Screen] = {}
        self._drawn: Piece | None = None
        self._drawn_at = float("-inf")
        self.hidden_lines = 0

    def feed(self, rank: int, stream: int, data: bytes) -> list[Piece]:
        """The complete lines that `data` brings about."""
        if not self._shows(rank, stream):
            self.hidden_lines += data.count(b"\n")
            return []
        lines = self._screens.setdefault((rank, stream), Screen()).feed(data)
        # A bar that ended just before on the other stream belongs before these lines.
        before = self._settle(rank, STDOUT + STDERR - stream) if lines else []
        return [*before, *self._lines(rank, stream, lines)]

    def tick(self, now: float) -> list[Piece]:
        """What time brings about: the final lines of bars that nobody comes back to, and a redraw.

        Args:
            now: monotonic time in seconds.
        """
        pieces: list[Piece] = []
        for (rank, stream), screen in self._screens.items():
            if screen.left and screen.left_at is None:
                screen.left_at = now
            elif screen.left_at is not None and now - screen.left_at >= _REDRAW_SECONDS:
                pieces += self._settle(rank, stream)
        drawing = [key for key, screen in self._screens.items() if screen.bars]
        if not self._live or not drawing or now - self._drawn_at < _REDRAW_SECONDS:
            return pieces
        rank, stream = min(drawing)
        bars = self._prefix(rank) + "  ".join(self._screens[rank, stream].bars)
        bar = (stream, bars[: self._columns - 1])
        if bar != self._drawn:
            pieces += [*self._erase(), bar]
            self._drawn, self._drawn_at = bar, now
        return pieces

    def close(self) -> list[Piece]:
        """What was begun and never ended, as lines."""
        pieces = self._erase()
        for (rank, stream), screen in sorted(self._screens.items()):
            pieces += self._lines(rank, stream, screen.close())
        self._screens.clear()
        return pieces

    def note(self, text: str) -> list[Piece]:
        """A line of the launcher's own."""
        return [] if self._mode == "none" else [*self._erase(), (STDOUT, f"[airdist] {text}\n")]

    def _shows(self, rank: int, stream: int) -> bool:
        if self._mode == "all":
            return True
        return self._mode != "none" and (rank == 0 or (self._mode == "default" and stream == STDERR))

    def _settle(self, rank: int, stream: int) -> list[Piece]:
        screen = self._screens.get((rank, stream))
        return self._lines(rank, stream, screen.settle()) if screen else []

    def _lines(self, rank: int, stream: int, lines: Iterable[str]) -> list[Piece]:
        text = "".join(f"{self._prefix(rank)}{line}\n" for line in lines)
        return [*self._erase(), (stream, text)] if text else []

    def _prefix(self, rank: int) -> str:
        return f"[rank {rank}] " if self._world_size != 1 else ""

    def _erase(self) -> list[Piece]:
        if self._drawn is None:
            return []
        stream, text = self._drawn
        self._drawn = None
        return [(stream, "\r" + " " * len(text) + "\r")]


def show(pieces: Iterable[Piece]) -> None:
    """Write pieces to the present `sys.stdout` and `sys.stderr`; a display that fails is no reason to end a launch."""
    for stream, text in pieces:
        target = sys.stdout if stream == STDOUT else sys.stderr
        try:
            _write(target, text)
        except (OSError, ValueError):  # closed, or its reader is gone
            continue


def redraws(target: TextIO) -> bool:
    """Whether a carriage return on this stream goes back to the beginning of the line for its reader."""
    return type(target).__module__.startswith(("ipykernel.", "google.colab.")) or target.isatty()


def columns() -> int:
    """How wide a line may be that `sys.stdout` is to take back."""
    return shutil.get_terminal_size((_NOTEBOOK_COLUMNS, 24)).columns


def _write(target: TextIO, text: str) -> None:
    try:
        target.write(text)
    except UnicodeEncodeError:
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "replace").decode(encoding))
    target.flush()
