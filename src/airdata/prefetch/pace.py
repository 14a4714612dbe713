"""How many fetches to run at once: what the measured throughput says.

Many small files want many requests under way, since each waits for its first byte; a few large ones fill the network,
the disk or the processor by themselves, and more of them only get in each other's way. Neither the store nor the files
are known beforehand, so this is a hill climb: change the number, measure, and keep what was better.

    double while that brings more ──► rest ──► try more, try fewer ──► rest longer ──► …
"""

from __future__ import annotations

import math

__all__ = ["Pace"]

# Of large files, and of small ones, most of which want many.
_FIRST, _FIRST_SMALL = 8, 32
# With fewer, one file that hangs would hold up too much.
_LEAST = 4
# A request costs about what this many bytes do: a first byte after 10 ms, at 100 MB/s.
_REQUEST_BYTES = 1 << 20
# Twice the fetches bring twice the throughput as long as waiting is all they do; noise brings a tenth.
_WORTH_MORE = 1.15
# Three quarters of the fetches are enough when next to nothing is lost.
_FEWER = 0.75
_WORTH_FEWER = 0.97
# Measurements to rest for after a change that did not help; doubled each time, so that trying costs less and less.
_FIRST_REST = 8
_LONGEST_REST = 256


class Pace:
    """A limit that follows the throughput. No clock and no threads of its own.

    Args:
        most: the limit is never above this.
        size: bytes of the first file; the others are taken to be like it.

    Attributes:
        limit: how many fetches may run now.
    """

    def __init__(self, most: int, size: int) -> None:
        self.limit = min(most, _FIRST_SMALL if size < _REQUEST_BYTES else _FIRST)
        self._most = most
        self._least = min(most, _LEAST)
        self._settled = self.limit  # the limit to go back to when the one being tried brings nothing
        self._rate = 0.0  # of the settled limit; 0 when it was not measured yet
        self._rest = 0
        self._next_rest = _FIRST_REST
        self._upwards = True
        self._skip = 0  # fetches that were begun under another limit
        self._since = math.nan
        self._count = 0
        self._work = 0

    def finished(self, size: int, now: float, *, more: bool) -> None:
        """One fetch has ended.

        Args:
            size: its bytes.
            now: seconds, on any clock.
            more: whether others were waiting to run. Without, it is the consumer that sets the pace, and what is
                measured says nothing about the store.
        """
        if not more:
            self._start(skip=0)
            return
        if self._skip:
            self._skip -= 1
            return
        if math.isnan(self._since):
            self._since = now
            return
        self._count += 1
        self._work += size + _REQUEST_BYTES
        if self._count >= 2 * self.limit and now > self._since:
            self._judge(self._work / (now - self._since))

    def _start(self, skip: int) -> None:
        self._skip = skip
        self._since = math.nan
        self._count = self._work = 0

    def _judge(self, rate: float) -> None:
        if self.limit == self._settled:
            self._rate = rate
            self._rest -= 1
            if self._rest < 0:
                self._try()
            else:
                self._start(skip=0)
        elif rate >= self._rate * (_WORTH_MORE if self.limit > self._settled else _WORTH_FEWER):
            self._settled, self._rate = self.limit, rate
            self._try()
        else:
            self._upwards = not self._upwards
            self._go(self._settled)
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)

    def _try(self) -> None:
        """Try the next limit in the present direction, or in the other one at the end of the road."""
        for _ in range(2):
            candidate = min(2 * self.limit, self._most) if self._upwards else max(self._least, int(_FEWER * self.limit))
            if candidate != self.limit:
                break
            self._upwards = not self._upwards
        self._go(candidate)

    def _go(self, limit: int) -> None:
        self._start(skip=self.limit)
        self.limit = limit
