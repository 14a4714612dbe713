"""Medians of measurements taken in turns, as a table and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Table:
    """Seconds of each side of a question.

    Attributes:
        title: the question.
        sides: the measurements of each side, in seconds.
        ratios: (over, under, target): "median of ``over`` / median of ``under``, and the least it should be".
        notes: what else a reader has to know.
        unit: of the measurements, seconds unless said otherwise.
    """

    title: str
    sides: Mapping[str, list[float]]
    ratios: list[tuple[str, str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unit: str = "s"

    def median(self, side: str) -> float:
        """The median of one side, in seconds."""
        return statistics.median(self.sides[side])

    def ratio(self, over: str, under: str) -> float:
        """How many times longer ``over`` takes than ``under``."""
        return self.median(over) / self.median(under)

    def __str__(self) -> str:
        width = max(map(len, self.sides))
        lines = [self.title]
        for side, times in self.sides.items():
            median, low, high = statistics.median(times), min(times), max(times)
            lines.append(f"  {side:<{width}}  {median:9.4f} {self.unit}   ({low:.4f} to {high:.4f})")
        lines += [
            f"  {over} / {under}: {self.ratio(over, under):.2f}   (target: at least {target:g})"
            for over, under, target in self.ratios
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def as_dict(self) -> dict:
        """What is saved as JSON."""
        return {
            "title": self.title,
            "seconds" if self.unit == "s" else self.unit: {side: sorted(times) for side, times in self.sides.items()},
            "ratios": {f"{over} / {under}": round(self.ratio(over, under), 3) for over, under, _ in self.ratios},
            "notes": self.notes,
        }

    def plot(self, path: Path) -> None:
        """Bars of the medians with the range of the measurements."""
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        names = list(self.sides)[::-1]
        medians = [self.median(name) for name in names]
        low = [self.median(name) - min(self.sides[name]) for name in names]
        high = [max(self.sides[name]) - self.median(name) for name in names]
        figure, axis = plt.subplots(figsize=(8, 1 + 0.5 * len(names)), layout="constrained")
        axis.barh(names, medians, xerr=[low, high], color="tab:blue", error_kw={"lw": 1, "capsize": 3})
        axis.set(xlabel=f"{self.unit}, median and range", title=self.title)
        axis.grid(axis="x", alpha=0.3)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def in_turns(rounds: int, sides: Mapping[str, Callable[[], float]], *, warm_up: bool = True) -> dict[str, list[float]]:
    """Measure every side once in each round, so that a change of the machine's mood meets all of them."""
    if warm_up:
        for side in sides.values():
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side())
    return times
