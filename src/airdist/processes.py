"""Who belongs to a launch, asked of the kernel, and how nobody of it is left behind.

Three facts of Linux do the work. A rank leads its own session, and its children stay in that session whatever process
group they move to. A process that adopts orphans (`PR_SET_CHILD_SUBREAPER`) gets every descendant whose parent died,
even one that left the session. `PR_SET_PDEATHSIG` ends a rank when its agent dies, also while it is blocked in native
code; it fires when the *thread* that started the process ends (Tencent-Hunyuan/UniRL#276), so only children of a
single-threaded process may ask for it, as ranks of an agent do.

Elsewhere (macOS) the process groups of the ranks are all there is, and these functions do less without failing.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["adopt_orphans", "descendants", "die_with", "kill", "program", "session_members"]

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when `parent`, its single-threaded parent, dies.

    Args:
        parent: pid that the parent said it has. A parent that died before the request was made would go unnoticed
            (sgl-project/sglang-omni#1077), so a different `getppid` afterwards ends this process here.
        number: the signal.
    """
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can hide."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(ancestor: int) -> list[int]:
    """Pids of the living descendants of a process; those that have ended and wait to be reaped do not count."""
    table = list(_processes())
    family = {ancestor}
    while grown := {pid for pid, _, parent, _ in table if parent in family} - family:
        family |= grown
    return [pid for pid, state, _, _ in table if pid in family and pid != ancestor and state != "Z"]


def session_members(sessions: Collection[int]) -> list[int]:
    """Pids of the living processes in these sessions, whatever process group they are in."""
    return [pid for pid, state, _, session in _processes() if session in sessions and state != "Z"]


def kill(pids: Collection[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to each of `pids` that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """(pid, state, parent, session) of every process that this one may see."""
    if not _LINUX:
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                # The command stands in parentheses and may itself contain any character, so count from the last one.
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                yield int(name), fields[0].decode(), int(fields[1]), int(fields[3])


def _prctl(option: int, value: int) -> None:
    import ctypes  # noqa: PLC0415 - 4 ms that a caller, which asks the kernel for nothing, need not take

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def program(module: str, function: str = "main") -> list[str]:
    """Arguments of an interpreter that shall run a function of this package; it finds its own from `sys.argv[2]` on.

    The package's directory stands last on its path, so that neither a module of the user's working directory nor a
    back-port beside this package takes the place of one of the standard library's.
    """
    path = "sys.path[:] = [*filter(None, sys.path), sys.argv[1]]"
    # The collector would search what is being imported again and again and find nothing: a tenth of the time.
    code = f"import gc, sys; gc.disable(); {path}; from {module} import {function}; gc.enable(); {function}()"
    return ["-c", code, str(Path(__file__).absolute().parents[1])]
