"""Runs a program that must not outlive whoever asked for it: the asker holds the other end of this process's stdin.

    asker ── pipe ──> tether <seconds> <program> ── SIGTERM, and SIGKILL after the seconds ──> program

Frameworks end their workers with SIGKILL, and some the workers' children with them. An agent ended like that leaves
what its ranks have started; one that is asked does not. So the program is no child of the worker: when the worker goes,
the pipe ends and the tether asks; when the tether itself is killed, the kernel asks.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from functools import partial

from airdist import processes

__all__ = ["main", "tethered"]


def tethered(argv: list[str], *, seconds: float, python: str = sys.executable) -> list[str]:
    """The command line of a tether around a program; its stdin is to be a pipe that the asker holds.

    Args:
        argv: the program.
        seconds: between asking it to end and ending it.
        python: interpreter of the tether.
    """
    return [python, *processes.program("airdist.engines.tether"), f"{seconds:g}", *argv]


def main() -> None:
    """Run the program that the arguments name, and leave with its exit code (128 + n when signal n has ended it)."""
    seconds, argv = float(sys.argv[2]), sys.argv[3:]
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # each comes through the pipe
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # There is one thread here, which both this hook and the signal that the kernel sends at our death need.
        preexec_fn=partial(processes.die_with, os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    )
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while process.poll() is None and not _asked(selector, awake):
            pass
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    code = process.wait()
    sys.exit(128 - code if code < 0 else code)


def _asked(selector: selectors.BaseSelector, awake: int) -> bool:
    """Wait for something to happen; whether the program is to end."""
    ready = {key.fd for key, _ in selector.select()}
    if awake in ready and set(os.read(awake, 1 << 10)) & {signal.SIGTERM, signal.SIGINT}:
        return True
    return 0 in ready and not os.read(0, 1 << 10)
