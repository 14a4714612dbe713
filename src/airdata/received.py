"""What a training loop has received of one iteration, and the position that this means for each of its sources.

Start of each source ──► Report with each batch ──► Received ──► (samples served, source) of each source
"""

from __future__ import annotations

from collections.abc import Sequence

from airdata.state import Place, Report, Start, pack_source

__all__ = ["Received"]


class Received:
    """What a training loop has received of one iteration.

    Args:
        starts: of each source; they differ in epoch and base, and agree on the topology.
        samples: of each source, in an epoch.

    Attributes:
        batches: received of each role.
        last: the role whose batch came last; -1 before the first.
    """

    def __init__(self, starts: Sequence[Start], samples: Sequence[int]) -> None:
        self.starts = tuple(starts)
        self.batches = [0] * starts[0].workers
        self.last = -1
        self._samples = tuple(samples)
        self._places = [list(start.places) for start in starts]  # of each source and role

    def add(self, report: Report) -> None:
        """One more batch has reached the training loop."""
        for places, place in zip(self._places, report.places, strict=True):
            places[report.role] = place
        self.batches[report.role] += 1
        self.last = report.role

    def position(self, number: int = 0) -> tuple[int, str]:
        """``samples_served`` and ``source`` of the state of a source."""
        start = self.starts[number]
        schedule = start.schedule(self._samples[number])
        if self._as_dealt():
            return schedule.served(sum(self.batches) if any(self._moved(number)) else 0), ""
        # The first step that some worker has not fully passed: nothing before it can still come.
        places = self._places[number]
        whole = min(
            place.passed // start.batch_size * start.workers + role if place.epoch == start.epoch else schedule.steps
            for role, place in enumerate(places)
        )
        turn = start.turn if self.last < 0 else (self.last + 1) % start.workers
        return schedule.served(whole), pack_source(start, places, turn)

    def _moved(self, number: int) -> list[bool]:
        return [place != _beginning(self.starts[number]) for place in self._places[number]]

    def _as_dealt(self) -> bool:
        """Whether what was received is the beginning of every source's order."""
        workers = len(self.batches)
        in_turn = [len(range(role, sum(self.batches), workers)) for role in range(workers)]
        if self.batches != in_turn:
            return False
        for number, (start, places) in enumerate(zip(self.starts, self._places, strict=True)):
            if any(place != _beginning(start) for place in start.places):
                return False
            if not any(self._moved(number)) and len(self.starts) > 1:
                continue  # a source whose turn has not come
            schedule = start.schedule(self._samples[number])
            for role, count in enumerate(in_turn):
                if places[role] != Place(start.epoch, schedule.length(start.rank, role, workers, count)):
                    return False
        return True


def _beginning(start: Start) -> Place:
    return Place(start.epoch)
