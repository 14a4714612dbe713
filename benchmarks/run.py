"""Run the benchmarks, print their tables, and save results and plots under ``benchmarks/results``.

Each question is a file of its own; its ``measure(rounds)`` returns a `Table`, or several. Both sides of a ratio are
measured in one run, in turns, and the medians are compared: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
from pathlib import Path

from report import Table

HERE = Path(__file__).parent


def questions() -> dict[str, Path]:
    """Every benchmark by its name, such as ``launch/first_line``."""
    return {
        str(path.relative_to(HERE).with_suffix("")): path
        for path in sorted(HERE.glob("*/*.py"))
        if path.parent.name not in {"results", "gpu"}
    }


def measure(name: str, rounds: int, *, quick: bool) -> list[Table]:
    """Run one question."""
    module = importlib.import_module(name.replace("/", "."))  # a name by which processes of its own find it too
    knows_quick = "quick" in inspect.signature(module.measure).parameters
    found = module.measure(rounds, **({"quick": quick} if knows_quick else {}))
    return [found] if isinstance(found, Table) else found


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(questions())}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--quick", action="store_true", help="see that it runs: the data benchmarks, with little data")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    unknown = set(options.names) - set(questions())
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    for name in options.names or questions():
        tables = measure(name, options.rounds, quick=options.quick)
        for number, table in enumerate(tables):
            print(f"\n{name}\n{table}", flush=True)
            target = options.out / (name.replace("/", "-") + (f"-{number + 1}" if len(tables) > 1 else ""))
            target.with_suffix(".json").write_text(json.dumps({**machine, **table.as_dict()}, indent=1) + "\n")
            table.plot(target.with_suffix(".png"))


if __name__ == "__main__":
    main()
