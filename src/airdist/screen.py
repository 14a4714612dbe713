r"""The part of a terminal that one stream of a rank can still rewrite: bytes in, finished lines out.

A progress bar goes back to the beginning of its line with a carriage return. A bar below it goes a line down, writes,
and comes up again ("\n\r...\x1b[A"), so the end of a bar's line is not the end of the bar until nothing comes back
to it. Anything else is finished with its line.
"""

from __future__ import annotations

import codecs
import re

__all__ = ["Screen"]

_MOVES = re.compile(r"(\n|\x1b\[\d*A)")
_UNFINISHED_MOVE = re.compile(r"\x1b(\[\d*)?$")
_LONGEST_LINE = 1 << 16  # a rank that never ends a line must not fill the caller's memory
_MOST_ROWS = 32


class Screen:
    """Rows that may change, and the one that the cursor is in.

    Attributes:
        left_at: for the owner's use: since when rows above the cursor have been waiting; None once it came back up.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""
        self._rows = [""]
        self._row = 0
        self.left_at: float | None = None

    @property
    def left(self) -> bool:
        """Whether the cursor has left rows above it that it may come back to."""
        return self._row > 0

    @property
    def bars(self) -> list[str]:
        """What bars show at present, from the top; nothing while one is being written below the others."""
        states = [_last_state(row) for row in self._rows if _is_bar(row)] if not self.left else []
        return [state for state in states if state.strip()]

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` finishes."""
        text = self._partial + self._decoder.decode(data)
        unfinished = _UNFINISHED_MOVE.search(text)
        self._partial = unfinished.group() if unfinished else ""
        lines: list[str] = []
        for part in _MOVES.split(text.removesuffix(self._partial)):
            if part == "\n":
                lines += self._down()
            elif part.startswith("\x1b[") and part.endswith("A"):
                self._row = max(0, self._row - int(part[2:-1] or 1))
                self.left_at = None
            elif part:
                lines += self._write(part)
        return lines

    def settle(self) -> list[str]:
        """Give up the rows above the cursor, as lines."""
        lines, self._rows, self._row, self.left_at = self._rows[: self._row], self._rows[self._row :], 0, None
        return _visible(lines)

    def close(self) -> list[str]:
        """Everything that is left, as lines; a row without anything was never begun."""
        rest = self._partial + self._decoder.decode(b"", final=True)
        lines = self._write(rest) if rest else []
        return lines + _visible([row for row in self._rows if row])

    def _write(self, text: str) -> list[str]:
        before = self._rows[self._row]
        row = _since_wiped(("" if before == "\r" else before) + text)
        if _is_bar(row):
            # Some writers return before a state, some after it; both must still work when more of it comes.
            row = f"\r{_last_state(row)}" + "\r" * row.endswith("\r")
        self._rows[self._row] = row
        return self._finish() if len(row) > _LONGEST_LINE and "\r" not in row else []

    def _down(self) -> list[str]:
        row = self._rows[self._row]
        last = self._row == len(self._rows) - 1
        if last and not _is_bar(row) and (row or not self.left):
            return self._finish()  # plain text: nobody comes back to it, nor to what is above it
        self._row += 1
        if last:
            self._rows.append("")
        return self.settle() if self._row > _MOST_ROWS else []

    def _finish(self) -> list[str]:
        lines, self._rows, self._row, self.left_at = self._rows, [""], 0, None
        return _visible(lines)


def _is_bar(row: str) -> bool:
    return "\r" in row.rstrip("\r")


def _since_wiped(row: str) -> str:
    """The part after a state of nothing but blanks: what is written then stands alone, as `tqdm.write` has it."""
    states = row.split("\r")
    wiped = max((index for index, state in enumerate(states[:-1]) if state.isspace()), default=None)
    if wiped is not None:
        return "\r".join(states[wiped + 1 :]) or "\r"
    return row


def _visible(rows: list[str]) -> list[str]:
    """What rows show in the end; a bar that wiped itself out leaves no line."""
    return [state for row in rows if (state := _last_state(row)).strip() or "\r" not in row]


def _last_state(row: str) -> str:
    """What a row shows after its carriage returns, for writers that overwrite all of it."""
    return row.rstrip("\r").rpartition("\r")[2]
