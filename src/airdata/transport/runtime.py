"""Where obstore can run.

Its runtime threads do not survive a fork, and a child whose parent has made a request would wait for ever, even with a
store of its own (lancedb#3339; measured). So obstore runs where nobody forks: in daemonic processes, which
multiprocessing forbids to have children, and which loader workers are. The process that trains keeps to fsspec.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import ClassVar

__all__ = ["note_use", "usable"]

_log = logging.getLogger(__name__)


class _State:
    """What is known of obstore in this process."""

    used: ClassVar = False
    lost_in_fork: ClassVar = False
    warned: ClassVar = False

    @classmethod
    def after_fork(cls) -> None:
        cls.lost_in_fork = cls.lost_in_fork or cls.used


os.register_at_fork(after_in_child=_State.after_fork)


def note_use() -> None:
    """Obstore is about to run in this process."""
    _State.used = True


def usable(*, anywhere: bool) -> bool:
    """Whether obstore can run in this process, and should.

    Args:
        anywhere: also where children may be forked, which will have to do without it.
    """
    if not anywhere and not multiprocessing.current_process().daemon:
        return False
    if _State.lost_in_fork and not _State.warned:
        _State.warned = True
        _log.warning(
            "process %d was forked from one that had used obstore, which cannot run here any more: it reads through "
            "fsspec, which needs more CPU. Start processes by 'spawn' or 'forkserver' to keep obstore.",
            os.getpid(),
        )
    return not _State.lost_in_fork
