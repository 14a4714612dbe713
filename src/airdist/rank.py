"""The program of one rank: take the payload, run the function, deliver the outcome, wait for the others, leave.

    argv: <import root> <run directory> <attempt> <agent's pid> <control descriptor> [<listening descriptor>]

It imports nothing that the payload does not need, so a rank without torch starts in tens of milliseconds.

It lingers after it has delivered: rank 0 holds the store, and a rank that left early would take it from the others. It
leaves through `os._exit`: an interpreter that shuts down with an open gloo group aborts now and then (3 of 20
successful torchrun jobs on a busy machine; none of 20 this way). What a shutdown does of use, flushing and exit
handlers, is done before.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airdist import caller_main, outcome, payload, processes
from airdist.channel import Channel
from airdist.rundir import RunDirectory
from airdist.tracking.rank import after_import, flush_rank, prepare_rank

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["main"]


def main() -> None:
    """Run one rank; does not return."""
    _, _, run_dir, attempt, agent, control_fd, *listening = sys.argv
    processes.die_with(int(agent))
    sock = socket.socket(fileno=int(control_fd))
    sock.set_inheritable(False)
    control = Channel(sock)
    rank = int(os.environ["RANK"])
    directory = RunDirectory(Path(run_dir))
    _answer_for_stacks(directory.stacks(rank))
    control.send("ready")
    if listening:
        _serve_store(int(listening[0]))

    result = _run(directory.payload)
    report = outcome.write(result, directory.result(rank, int(attempt)), rank=rank)
    control.send(
        "delivered",
        outcome=report.kind,
        summary=report.summary,
        traceback=report.traceback,
        at=time.monotonic(),
    )
    while not control.closed and not control.receive():  # the agent's "bye", or its end
        pass
    _leave(failed=report.kind == "error")


def _run(path: Path) -> outcome.Returned | outcome.Raised:
    """Load the payload and call the function; whatever it raises is an outcome."""
    try:
        with path.open("rb") as file:
            context: payload.Context = pickle.load(file)  # noqa: S301 - written by this user's own launch, mode 0700
            context.enter()
            prepare_rank()
            if "AIRDIST_COMPAT" in os.environ:
                from airdist import compat  # noqa: PLC0415 - only where the caller has installed it

                compat.install()
            definitions, call = payload.read(file)
        caller_main.adopt({**call.main_globals(), **definitions})
    except BaseException as error:  # noqa: BLE001 - the caller is to see it, whatever it is
        return outcome.Raised(error, while_loading=True)
    try:
        return outcome.Returned(call())
    except BaseException as error:  # noqa: BLE001 - as above
        return outcome.Raised(error)


def _answer_for_stacks(path: Path) -> None:
    """Let SIGUSR2 write the stacks of all threads to a file, also while Python is stuck in native code."""
    faulthandler.enable()
    file = path.open("wb")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _kept.append(file)


def _serve_store(descriptor: int) -> None:
    """Open the store of the launch on the agent's listening socket, as soon as `torch.distributed` is imported.

    Peers that are faster wait in the socket's backlog. The store must be there before any `init_process_group`, and
    torch must not be imported for a function that does without it; the moment right after the import serves both.
    """
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - the parameter has no other name

    def serve(module: ModuleType) -> None:
        try:
            store = module.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        except BaseException:  # noqa: BLE001 - without a store every rank would wait for its time-out
            traceback.print_exc()
            os._exit(1)
        _kept.append(store)

    after_import("torch.distributed", serve)


def _leave(*, failed: bool) -> None:
    """Do what a shutdown would do of use, then end without one; the agent sees to it that this ends."""
    flush_rank(failed=failed)
    with suppress(Exception):
        atexit._run_exitfuncs()  # noqa: SLF001 - loggers flush in exit handlers, which `os._exit` would skip
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


_kept: list[Any] = []
"""What must live as long as the process."""
