"""An agent in the hands of a framework's worker: started under a tether, heard to its end, ended with its holder.

It travels by value with the task that calls it, so that the workers' own packages decide nothing before the agent runs,
and imports the standard library only.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["hold"]

_TAIL_BYTES = 2000
_POLL_SECONDS = 0.2


def hold(argv: Sequence[str], environ: Mapping[str, str], any_python: str | None, **popen: Any) -> tuple[int, str]:
    """Run an agent to its end.

    Args:
        argv: its command line, under a tether whose stdin is a pipe that this process holds: when the framework ends
            the task, or this process, the tether asks the agent to end.
        environ: all of its environment; it holds the secret.
        any_python: interpreter in the command line in whose place the worker's own may stand.
        popen: what else `subprocess.Popen` is to be told.

    Returns:
        Its exit code, and the end of its output.
    """
    output: deque[int] = deque(maxlen=_TAIL_BYTES)
    process = subprocess.Popen(
        [sys.executable if part == any_python else part for part in argv],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **popen,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while True:
            # Ray cancels by an interrupt that Python sees only between two of its instructions.
            if select.select([process.stdout], [], [], _POLL_SECONDS)[0]:
                data = os.read(process.stdout.fileno(), 1 << 12)
                if not data:
                    break
                output.extend(data)
    finally:
        process.stdin.close()  # the tether
        process.wait()
        process.stdout.close()
    return process.returncode, bytes(output).decode(errors="replace").strip()
