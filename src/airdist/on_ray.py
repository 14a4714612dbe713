"""What the ranks of a `ray_launch` run: a Ray of their own around one call of the function.

    first rank of node 0   ray.init: the head ── the body, once ──> value
    first rank of node k   ray start --address=<head>, until the body has ended
    the others             stand for accelerators that Ray gives to its tasks, and return None at once

A Ray that already runs on a machine is not touched: ports, directory and token of this one are its own. It ends with
the ranks, however those end.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from airdist import runtime
from airdist.engines.tether import tethered
from airdist.environ import launch_environ
from airdist.errors import LaunchError
from airdist.failure import tail
from airdist.payload import Name

__all__ = ["TEMP_DIR", "OnRay", "checked_root", "import_ray"]

TEMP_DIR = "RAY_TEMP_DIR"
"""Names the directory below which Ray is to keep its files."""

# What Ray puts below its directory for its longest socket: session, date, time and pid. The address of a Unix socket
# has 107 bytes at most.
_LONGEST_ROOT = 107 - len("/session_2026-01-31_14-05-02_123456_1234567/sockets/plasma_store")
_NEW = "airdist-12345678"
_END_SECONDS = 5.0
_POLL_SECONDS = 0.2
_ADDRESS, _DONE = "airdist.ray/address", "airdist.ray/done"
_STORE = ("MASTER_ADDR", "MASTER_PORT")


class OnRay:
    """What each rank of such a launch runs.

    Args:
        function: the body.
        seconds: for Ray to come up on all nodes.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        functools.update_wrapper(self, function)
        self._seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        """By the body's name where ranks find it under that, as any function of a launch."""
        return _rebuild, (Name.of(self.__wrapped__) or self.__wrapped__, self._seconds)

    @property
    def __globals__(self) -> dict[str, Any]:
        """The body's, for `airdist.payload.Call`."""
        found: dict[str, Any] = getattr(self.__wrapped__, "__globals__", {})
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Be the head, a node, or nothing."""
        if runtime.get_local_rank():
            return None
        nodes = int(os.environ.get("GROUP_WORLD_SIZE") or runtime.get_world_size() // runtime.get_local_world_size())
        with _session_directory() as folder:
            if runtime.get_node_rank():
                _be_node(_store(self._seconds), folder, self._seconds)
                return None
            with _head(folder, nodes, self._seconds), _outside_world(*_STORE):
                return self.__wrapped__(*args, **kwargs)


def _rebuild(function: Callable[..., Any] | Name, seconds: float) -> OnRay:
    return OnRay(function.resolve() if isinstance(function, Name) else function, seconds)


@contextmanager
def _head(folder: str, nodes: int, seconds: float) -> Iterator[None]:
    """A Ray of all nodes, with this process connected to it; the other nodes learn where it is, and when it ends."""
    ray = import_ray()
    store = _store(seconds) if nodes > 1 else None
    host = socket.gethostbyname(os.environ["MASTER_ADDR"]) if store else None
    with _outside_world():  # Ray's workers inherit what this process has now
        context = ray.init(
            address="local", _node_ip_address=host, _temp_dir=folder, include_dashboard=False, logging_level="WARNING"
        )
    try:
        if store is not None:
            store.set(_ADDRESS, context.address_info["address"])
            _wait_for_nodes(ray, nodes, seconds)
        yield
    finally:
        if store is not None:
            store.set(_DONE, b"")
        ray.shutdown()


def _be_node(store: Any, folder: str, seconds: float) -> None:
    """Lend this node to the Ray of node 0 until that has no more use for it."""
    node = runtime.get_node_rank()
    try:
        store.wait([_ADDRESS], timedelta(seconds=seconds))
    except RuntimeError as error:  # the store's
        raise LaunchError(f"node {node}: node 0 has not started Ray within {seconds:g} s ({error})") from None
    address = store.get(_ADDRESS).decode()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
    own = [f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0"]
    log = Path(folder, "start.log")
    with (
        log.open("wb") as output,
        subprocess.Popen(
            tethered([*start, *own], seconds=_END_SECONDS),
            env=_environ_outside(os.environ),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        assert process.stdin is not None
        with process.stdin:  # Ray ends here when this does
            while not store.check([_DONE]):
                if process.poll() is not None:
                    raise LaunchError(f"node {node}: Ray ended with {process.returncode}: {'; '.join(tail(log))}")
                time.sleep(_POLL_SECONDS)


def _wait_for_nodes(ray: Any, nodes: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (alive := sum(node["Alive"] for node in ray.nodes())) < nodes:
        if time.monotonic() >= deadline:
            raise LaunchError(f"{alive} of {nodes} nodes have joined Ray within {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _store(seconds: float) -> Any:
    """The launch's own store, at the address that every rank is told; node 0 serves it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - not needed on one node

    host, port = (os.environ[name] for name in _STORE)
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = runtime.get_global_rank() == 0
    limit = timedelta(seconds=seconds)
    return TCPStore(host, int(port), is_master=first and not served, wait_for_workers=False, timeout=limit)


def _environ_outside(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what tells a rank its place, and without another Ray's address."""
    kept = launch_environ(environ, overrides={}, nprocs=1, visible=None)
    return {name: value for name, value in kept.items() if name not in {"RAY_ADDRESS", "RAY_NAMESPACE"}}


@contextmanager
def _outside_world(*kept: str) -> Iterator[None]:
    """Let this process, for a while, be no rank.

    Args:
        kept: variables that stay. `MASTER_ADDR` and `MASTER_PORT` must while torch may be imported: the launch's store
            opens there then.
    """
    before = dict(os.environ)
    outside = _environ_outside(before)
    gone = [name for name in before if name not in outside and name not in kept]
    for name in gone:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: before[name] for name in gone})


@contextmanager
def _session_directory() -> Iterator[str]:
    """A new directory for one Ray, so that "the Ray of this machine" stays what it was for everybody else."""
    # The last one is short everywhere; what is made in it is private.
    roots = [os.environ.get(TEMP_DIR), tempfile.gettempdir(), "/tmp"]  # noqa: S108
    root = next(root for root in roots if root and (root == roots[0] or len(root) + len(_NEW) < _LONGEST_ROOT))
    checked_root(os.path.join(root, _NEW))
    os.makedirs(root, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="airdist-", dir=root)
    keep = False
    try:
        yield folder
    except Exception:
        keep = True
        print(f"Ray's own logs are kept: {folder}", file=sys.stderr)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def checked_root(root: str) -> str:
    """The directory itself, if Ray can work below it.

    Raises:
        LaunchError: when its name is too long.
    """
    if len(os.fsencode(root)) > _LONGEST_ROOT:
        raise LaunchError(
            f"{root} has too long a name for the sockets that Ray makes below it ({_LONGEST_ROOT} bytes at most): set "
            f"{TEMP_DIR}, for instance to /tmp/ray"
        )
    return root


def import_ray() -> Any:
    """The package.

    Raises:
        LaunchError: when it cannot be imported.
    """
    try:
        import ray  # noqa: PLC0415 - where it is used
    except ImportError as error:
        raise LaunchError(f"Ray cannot be imported ({error}): install 'airdata[ray]'") from error
    return ray
