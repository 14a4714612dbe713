"""Output of ranks on its way to a person: bytes in, prefixed lines and one calm progress bar out.

`Console` is pure: it is fed bytes and a time and returns what to write. `show` writes it. Both run in the thread that
called `.distributed()`, because a notebook puts what other threads write under whichever cell is current
(ipython/ipykernel#1199).
"""

from __future__ import annotations

import codecs
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LOG_MODES", "Console", "LogMode", "Piece", "redraws", "show"]

LogMode = Literal["default", "all", "rank0", "none"]
LOG_MODES: tuple[LogMode, ...] = ("default", "all", "rank0", "none")

STDOUT, STDERR = 1, 2
_REDRAW_SECONDS = 0.2
_LONGEST_LINE = 1 << 16  # a rank that never ends a line must not fill the caller's memory
_CURSOR_UP = re.compile(r"\x1b\[\d*A")  # bars below bars: the cursor of a rank is not the caller's

Piece = tuple[int, str]
"""A stream (1 or 2) and the text to write to it."""


@dataclass
class _Stream:
    """What one stream of one rank has begun and not ended."""

    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    open_line: str = ""


class Console:
    """Turns the bytes of many ranks into readable lines.

    A progress bar redraws itself with carriage returns. Of each line only the last state counts; of the bars that are
    being drawn, the one of the lowest rank is shown, at most five times a second; the final state of every bar is an
    ordinary line.

    Args:
        world_size: number of ranks; a single one needs no prefix.
        mode: "all": everything; "default": rank 0, and what the others write to stderr; "rank0"; "none".
        live: whether the place of display understands a carriage return; elsewhere only final states appear.
    """

    def __init__(self, world_size: int, mode: LogMode = "default", *, live: bool = True) -> None:
        self._world_size = world_size
        self._mode = mode
        self._live = live
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._bars: dict[tuple[int, int], str] = {}
        self._drawn: Piece | None = None
        self._drawn_at = float("-inf")
        self.hidden_lines = 0

    def feed(self, rank: int, stream: int, data: bytes) -> list[Piece]:
        """The complete lines that `data` brings about."""
        if not self._shows(rank, stream):
            self.hidden_lines += data.count(b"\n")
            return []
        state = self._streams.setdefault((rank, stream), _Stream())
        *lines, rest = (state.open_line + _CURSOR_UP.sub("", state.decoder.decode(data))).split("\n")
        if len(rest) > _LONGEST_LINE and "\r" not in rest:
            lines, rest = [*lines, rest], ""
        if lines:
            self._bars.pop((rank, stream), None)
        if "\r" in rest:
            state_now = self._bars[rank, stream] = _last_state(rest)
            # Some writers return before a state, some after it; both must still work when more of it comes.
            rest = f"\r{state_now}" + "\r" * rest.endswith("\r")
        state.open_line = rest
        return self._lines(rank, stream, lines)

    def tick(self, now: float) -> list[Piece]:
        """A redraw of the progress bar, if it is time for one.

        Args:
            now: monotonic time in seconds.
        """
        bars = {key: bar for key, bar in self._bars.items() if bar.strip()}
        if not self._live or not bars or now - self._drawn_at < _REDRAW_SECONDS:
            return []
        rank, stream = min(bars)
        bar = (stream, self._prefix(rank) + bars[rank, stream])
        if bar == self._drawn:
            return []
        pieces = [*self._erase(), (stream, bar[1])]
        self._drawn, self._drawn_at = bar, now
        return pieces

    def close(self) -> list[Piece]:
        """What was begun and never ended, as lines."""
        pieces = self._erase()
        for (rank, stream), state in sorted(self._streams.items()):
            rest = state.open_line + state.decoder.decode(b"", final=True)
            if rest:
                pieces += self._lines(rank, stream, [rest])
        self._streams.clear()
        self._bars.clear()
        return pieces

    def note(self, text: str) -> list[Piece]:
        """A line of the launcher's own."""
        return [] if self._mode == "none" else [*self._erase(), (STDOUT, f"[airdist] {text}\n")]

    def _shows(self, rank: int, stream: int) -> bool:
        if self._mode == "all":
            return True
        return self._mode != "none" and (rank == 0 or (self._mode == "default" and stream == STDERR))

    def _lines(self, rank: int, stream: int, lines: Iterable[str]) -> list[Piece]:
        text = "".join(
            f"{self._prefix(rank)}{state}\n"
            for line in lines
            if (state := _last_state(line)).strip() or "\r" not in line  # a bar that wiped itself out leaves no line
        )
        return [*self._erase(), (stream, text)] if text else []

    def _prefix(self, rank: int) -> str:
        return f"[rank {rank}] " if self._world_size > 1 else ""

    def _erase(self) -> list[Piece]:
        if self._drawn is None:
            return []
        stream, text = self._drawn
        self._drawn = None
        return [(stream, "\r" + " " * len(text) + "\r")]


def _last_state(line: str) -> str:
    """What a line shows after its carriage returns, for writers that overwrite all of it."""
    return line.rstrip("\r").rpartition("\r")[2]


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


def _write(target: TextIO, text: str) -> None:
    try:
        target.write(text)
    except UnicodeEncodeError:
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "replace").decode(encoding))
    target.flush()
