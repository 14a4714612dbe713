"""Manifests that the processes of a node share: listed once, mapped by all.

    rank A ─┐                      ┌─ lists, writes <cache>/manifests/<launch, volume, pattern, turn>.arrow
    rank B ─┼─► lock on one file ──┤
    rank C ─┘                      └─ finds that file, maps it

What may be shared is the hard part: a later run must see new files, and so must the second dataset of one program. So a
listing is shared only by processes that one launcher started together, and only for the same turn: the first dataset of
a program on a volume shares with the first of its peers, the second with the second. A process that no launcher started
lists for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

from airdata.errors import EmptyListingError, ManifestError
from airdata.manifest import Manifest
from airdata.manifest.patterns import Selection
from airdata.manifest.reading import read_listing
from airdata.transport import Transport

__all__ = ["list_volume", "map_shared"]

_log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
# Ranks of a launch start within seconds of each other; a listing that began this long before its reader's process did
# belongs to an earlier launch, whatever its name says (launchers that live long and choose the same port again).
_START_SPREAD = 60.0
_LOCK_PAUSE = 0.01
_LOCK_SECONDS = 3600.0
_WORTH_SHARING_BYTES = 1 << 20
_KEPT_SECONDS = 7 * 24 * 3600.0  # the longest a launch runs where launches are bounded
_LAUNCH_VARIABLES = (
    "MASTER_ADDR MASTER_PORT WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT SLURM_JOB_ID "
    "SLURM_STEP_ID".split()
)
_turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


def list_volume(transport: Transport, selection: Selection, directory: str | None) -> Manifest:
    """The manifest of a volume, listed now or by a peer of this launch.

    Args:
        transport: of the volume.
        selection: which of its files.
        directory: where manifests of this node lie; made when missing. None keeps the manifest in memory.

    Raises:
        EmptyListingError: there is no such file, also after a wait of a few seconds.
    """
    if directory is not None:
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            return _list_shared(transport, selection, directory)
        except EmptyListingError:
            raise
        except (OSError, ManifestError) as error:
            if not isinstance(error, ManifestError) and error.filename is None:
                raise  # the source's trouble, not the directory's
            _log.warning(
                "the manifest cannot be shared through %s (%s); this process lists for itself", directory, error
            )
    return read_listing(transport, selection)


def _list_shared(transport: Transport, selection: Selection, directory: str) -> Manifest:
    launch = launch_key(os.environ)
    what = f"{transport.volume.url}\0{selection.prefixes}\0{selection}"
    turn = next(_turns[what])
    # Without a launch the process id keeps the name to ourselves.
    owner = launch if launch is not None else f"process {os.getpid()} {time.time_ns()}"
    name = hashlib.blake2b(f"{owner}\0{turn}\0{what}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
    file = os.path.join(directory, f"{name}.arrow")
    with _locked(os.path.join(directory, f"{name[:2]}.lock") if launch is not None else None):
        with contextlib.suppress(FileNotFoundError):
            if launch is not None and os.stat(file).st_mtime > _process_start() - _START_SPREAD:
                return Manifest.map(file)
        manifest = read_listing(transport, selection).write(file)
    _sweep(directory)
    return manifest


def map_shared(manifest: Manifest, directory: str | None) -> Manifest:
    """The same manifest, mapped from a file that every process of this node maps which was given the same one.

    Otherwise each rank would hold its own copy, and each spawned worker be sent one: 170 MiB for two million files.

    Args:
        manifest: in memory, such as one that was loaded. A mapped or a small one is returned as it is.
        directory: as for :func:`list_volume`.
    """
    if directory is None or manifest.is_mapped or manifest.memory_bytes < _WORTH_SHARING_BYTES:
        return manifest
    file = os.path.join(directory, f"{manifest.content_digest()}.arrow")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.path.exists(file):
            os.utime(file)  # it is in use: see _sweep
            return Manifest.map(file)
        return manifest.write(file)
    except (OSError, ManifestError) as error:
        _log.warning("the manifest cannot be shared through %s (%s); this process keeps its own", directory, error)
        return manifest
    finally:
        _sweep(directory)


def launch_key(environ: Mapping[str, str]) -> str | None:
    """What the ranks of this node and launch have in common and no other process has, or None without a launcher."""
    try:
        ranks_here = int(environ.get("LOCAL_WORLD_SIZE") or 1)
    except ValueError:
        return None
    if ranks_here < 2:  # noqa: PLR2004 - nobody to share with
        return None
    # The launcher of a node is the parent of its ranks; its start time tells it from an earlier process of that number.
    parent = os.getppid()
    facts = [f"{name}={environ.get(name, '')}" for name in _LAUNCH_VARIABLES]
    return "\0".join([f"{parent} {_started(parent)}", *facts])


def _started(pid: int | str) -> float:
    """Seconds after boot when a process started; 0 where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _process_start() -> float:
    """When this process started, in seconds of ``time.time()``."""
    started = _started("self")
    try:
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):
        return time.time()
    return time.time() - (uptime - started) if started else time.time()


@contextlib.contextmanager
def _locked(file: str | None) -> Iterator[None]:
    """Hold the lock on a file that is never unlinked; the kernel frees it if we die."""
    if file is None:
        yield
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        start = reported = time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
            if now - start > _LOCK_SECONDS:
                raise TimeoutError(errno.ETIMEDOUT, f"a peer has been listing for {_LOCK_SECONDS:.0f} s", file)
            if now - reported > _PROGRESS_SECONDS:
                reported = now
                _log.info("waiting for a peer of this node that lists the volume")
            time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _sweep(directory: str) -> None:
    """Remove manifests that nobody can still need by name: a map outlives its file."""
    oldest = time.time() - _KEPT_SECONDS
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((".arrow", ".part")) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
