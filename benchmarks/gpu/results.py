"""A table with what it proves, as text, as JSON and as bars.

A section, or a rank inside of it, appends each result to one file as soon as it has it; the program at the top shows
what arrives there. A run that is killed has therefore shown everything that was finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass
class Result:
    """One question and its answer.

    Attributes:
        title: the question.
        columns: names of the columns.
        rows: as many values each; numbers are shown with three digits.
        checks: what should hold, and whether it does.
        notes: what else a reader has to know.
        bars: values worth a picture, by label.
        unit: of the bars.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    checks: list[tuple[str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: dict[str, float] = field(default_factory=dict)
    unit: str = "seconds"

    def check_at_most(self, what: str, value: float, bound: float) -> None:
        """Note whether a value stays within its bound."""
        self.checks.append((f"{what}: {shown(value)} (at most {shown(bound)})", value <= bound))

    def check_at_least(self, what: str, value: float, bound: float) -> None:
        """Note whether a value reaches its target."""
        self.checks.append((f"{what}: {shown(value)} (at least {shown(bound)})", value >= bound))

    def markdown(self) -> str:
        """The table and what it proves."""
        cells = [list(self.columns), *([shown(value) for value in row] for row in self.rows)]
        widths = [max(len(row[n]) for row in cells) for n in range(len(self.columns))]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        proofs = [f"* {'holds' if ok else '**does not hold**'}: {text}" for text, ok in self.checks]
        below = "\n".join([*proofs, *(f"* {note}" for note in self.notes)])
        return "\n".join([f"### {self.title}", "", *lines, *(["", below] if below else []), ""])


def shown(value: object) -> str:
    """A value as a cell of a table."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value).replace("|", "/").replace("\n", " ")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def publish(report: str, result: Result) -> None:
    """Append a result to the report, in one write, so that readers see whole lines only."""
    line = json.dumps(asdict(result)) + "\n"
    file = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def arrived(report: str, seen: int) -> list[Result]:
    """The results in a report after the first ``seen``."""
    if not os.path.exists(report):
        return []
    with open(report, encoding="utf-8") as lines:
        whole = [line for line in lines if line.endswith("\n")]
    return [Result(**json.loads(line)) for line in whole[seen:]]
