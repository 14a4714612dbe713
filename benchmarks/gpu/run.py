"""Everything that must hold on GPUs, on one machine with any number of them: tables, JSON and a plot.

    python benchmarks/gpu/run.py                            every visible GPU, all sections, within nine minutes
    python benchmarks/gpu/run.py --only stall,feeding --gib 64 --seconds 1500     what --out has of the others stays
    python benchmarks/gpu/run.py --device cpu --ranks 2     the same code with gloo and small sizes, to try it out

Each section runs in a process of its own with a limit of its own. Its tables are shown as soon as they are there, and
what goes wrong in it stays in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # ranks have the caller's path, and find the sections as the package "gpu"

from airdist.processes import die_with  # noqa: E402
from gpu import machine, results  # noqa: E402
from gpu.machine import Setting  # noqa: E402
from gpu.results import Result  # noqa: E402

# Shares of the time, by what a run with 8 GiB takes on one H200.
SECTIONS = {"launch": 60, "training": 80, "stall": 140, "reshard": 1, "feeding": 150, "metrics": 35}
RESHARD_SHARE = 55  # with more than one rank
GRACE = 1.6  # how much longer than its share a section may take before it is ended


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, help="default: every visible GPU; 2 on the CPU")
    parser.add_argument("--only", help=f"sections, with commas between: {','.join(SECTIONS)}")
    parser.add_argument("--gib", type=float, help="bytes of state over all ranks (default: 8; on the CPU 1/32)")
    parser.add_argument("--seconds", type=float, default=520, help="for all sections together")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "gpu")
    parser.add_argument("--work", default=tempfile.gettempdir(), help="a directory on the disk to measure")
    parser.add_argument("--section", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        # Whatever ends this program ends its section, and with that the section's launches.
        die_with(os.getppid())
        name, setting = options.section
        importlib.import_module(f"gpu.{name}").measure(Setting(**json.loads(setting)))
        return
    chosen = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    small = options.device == "cpu"
    ranks = options.ranks or (2 if small else len(machine.visible_gpus()))
    if not ranks:
        parser.error("no GPU is visible; --device cpu tries the script out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what stands below under "finally" is done
    options.out.mkdir(parents=True, exist_ok=True)
    work = tempfile.mkdtemp(prefix="airdata-gpu-", dir=options.work)
    gib = options.gib or (1 / 32 if small else 8.0)
    base = Setting(options.device, ranks, gib, work, "", time.monotonic() + options.seconds, small)
    try:
        if not run_sections(base, chosen, options.out):
            sys.exit(1)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run_sections(base: Setting, chosen: list[str], out: Path) -> bool:
    """Run every section within its share of the time; whether all of them came to their end."""
    kind = machine.describe(base)
    print("  ".join(f"{name}: {value};" for name, value in kind.items()), flush=True)
    shares = {name: RESHARD_SHARE if name == "reshard" and base.ranks > 1 else SECTIONS[name] for name in chosen}
    found = earlier(out, kind, chosen)
    whole = True
    for name in chosen:
        began = time.monotonic()
        left = base.deadline - began
        waiting = chosen[chosen.index(name) :]
        share = max(10.0, left * shares[name] / sum(shares[other] for other in waiting))
        work = os.path.join(base.work, name)
        os.mkdir(work)
        setting = dataclasses.replace(base, work=work, report=f"{work}.jsonl", deadline=began + share)
        print(f"\n## {name}\n", flush=True)
        trouble = run_section(name, setting, began + share * GRACE, out, found)
        shutil.rmtree(work, ignore_errors=True)
        if trouble:
            whole = False
            print(trouble, flush=True)
            found[name].append(Result(f"{name} did not end well", ["what"], [[trouble[-300:]]]))
        save(kind, found, out)
        print(f"({name}: {time.monotonic() - began:.0f} s)", flush=True)
    return whole


def run_section(name: str, setting: Setting, limit: float, out: Path, found: dict[str, list[Result]]) -> str:
    """Run one section and show its results as they come; what went wrong, or nothing."""
    command = [sys.executable, __file__, "--section", name, json.dumps(dataclasses.asdict(setting))]
    environ = {
        **os.environ,
        "AIRDIST_RUN_DIR": setting.path("runs"),
        "AIRDATA_CACHE_DIR": setting.path("cache"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{setting.path('mlflow.db')}",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    log = Path(f"{setting.work}.log")
    answers = found[name] = []

    def show_what_came() -> None:
        for result in results.arrived(setting.report, len(answers)):
            answers.append(result)
            print(result.markdown(), flush=True)

    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < limit:
                show_what_came()
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                # Its agent notices and ends the ranks.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    show_what_came()
    if process.returncode == 0:
        return ""
    words = log.read_text(encoding="utf-8", errors="replace")
    kept = out / f"{name}.log"
    kept.write_text(words[-200_000:], encoding="utf-8")
    end = "ran out of time" if time.monotonic() > limit else f"ended with status {process.returncode}"
    return f"{name} {end}; the end of its output, all of which is in {kept.name}:\n{words[-3000:]}"


def earlier(out: Path, kind: dict[str, object], chosen: list[str]) -> dict[str, list[Result]]:
    """What an earlier run with the same kind of machine found in the sections that do not run now."""
    try:
        data = json.loads((out / "results.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # none, or one that a killed run has left half written
        return {}
    same = all(data["machine"].get(name) == kind[name] for name in ("GPUs", "ranks", "state, GiB", "torch"))
    others = {name: answers for name, answers in data["sections"].items() if same and name not in chosen}
    return {name: [Result(**answer) for answer in answers] for name, answers in others.items()}


def save(kind: dict[str, object], found: dict[str, list[Result]], out: Path) -> None:
    """Write what there is: markdown, JSON and, where matplotlib is there, a picture."""
    found = {name: found[name] for name in SECTIONS if name in found}
    about = "\n".join(f"* {name}: {value}" for name, value in kind.items())
    tables = "\n".join(f"## {name}\n\n" + "\n".join(r.markdown() for r in answers) for name, answers in found.items())
    (out / "tables.md").write_text(f"# On GPUs\n\n{about}\n\n{tables}", encoding="utf-8")
    data = {name: [dataclasses.asdict(result) for result in answers] for name, answers in found.items()}
    (out / "results.json").write_text(json.dumps({"machine": kind, "sections": data}, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot(str(kind["GPUs"]), [r for answers in found.values() for r in answers if r.bars], out / "plot.png")


def plot(title: str, answers: list[Result], path: Path) -> None:
    """One panel of bars for each result that has some."""
    if not answers:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    heights = [1 + len(result.bars) for result in answers]
    figure, axes = plt.subplots(
        len(answers),
        1,
        figsize=(9, 1 + 0.42 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, result in zip(axes[:, 0], answers, strict=True):
        labels = list(result.bars)[::-1]
        values = [result.bars[label] for label in labels]
        ours = ["tab:orange" if "airdata" in label or "airdist" in label else "tab:blue" for label in labels]
        axis.barh(labels, values, color=ours)
        axis.bar_label(axis.containers[0], [results.shown(value) for value in values], padding=3, fontsize="small")
        axis.set_title(result.title, fontsize="medium")
        axis.set_xlabel(result.unit, fontsize="small")
        axis.margins(x=0.12)
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
