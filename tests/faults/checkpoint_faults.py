"""Faults of saving and loading, made to happen to our writer and reader or to PyTorch's, and told in words.

save ── fault ──► how the save went ──► load ──► whose bits came

Each function takes the side (``"ours"`` or ``"stock"``), a place, and the ``Bench`` of
the tests, and returns what the user sees.
As a program it is the process that is killed again and again, or one rank of two.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from airdata.checkpoint import UCVolumeReader, UCVolumeWriter

TENSORS, LENGTH = 6, 50_000
FIRST, SECOND, MIX = (
    "the first save's bits load",
    "the second save's bits load",
    "**a mix of both saves loads, silently**",
)
NOTHING = "there is nothing to load, and the load fails"
SILENT = "**wrong bits load, silently**"


def state(value):
    return {f"t{n}": torch.full((LENGTH,), value) for n in range(TENSORS)}


def writer(side, place, *, a_file_each=False, options=None, **more):
    if side == "ours":
        return UCVolumeWriter(
            place, storage_options=options, **({"file_bytes": 1, "threads": 1} if a_file_each else {}) | more
        )
    if options is not None:
        return FsspecWriter(place, single_file_per_rank=not a_file_each, **options, **more)
    return FileSystemWriter(place, single_file_per_rank=not a_file_each, **more)


def reader(side, place, options=None):
    if side == "ours":
        return UCVolumeReader(place, storage_options=options, threads=1)
    return FileSystemReader(place) if options is None else FsspecReader(place, **options)


def save(side, place, value, planner=None, **options):
    """Save, and say how it went."""
    target = writer(side, place, **options)
    return told("the save", lambda: dcp.save(state(value), storage_writer=target, planner=planner, no_dist=True))


def load(side, place, planner=None, options=None):
    """Load, and say what came."""
    target = state(0.0)
    source = reader(side, place, options)
    went = told("the load", lambda: dcp.load(target, storage_reader=source, planner=planner, no_dist=True))
    if "fails" in went:
        return went
    found = {value for tensor in target.values() for value in tensor.unique().tolist()}
    return {(1.0,): FIRST, (2.0,): SECOND, (1.0, 2.0): MIX}.get(tuple(sorted(found)), SILENT)


def told(what, act):
    try:
        act()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the very thing to be told
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        # torch wraps either in an AssertionError
        if "no checkpoint is published here" in str(error) or ".metadata" in str(error).partition("No such file")[2]:
            return NOTHING
        return f"{what} fails: `{type(error).__name__}`"
    return f"{what} succeeds"


class Doing(DefaultSavePlanner):
    """Does something when the n-th item is written."""

    def __init__(self, number, act):
        super().__init__()
        self.number, self.act, self.lock, self.seen = number, act, threading.Lock(), 0

    def resolve_data(self, write_item):
        with self.lock:
            self.seen += 1
            now = self.seen == self.number
        if now:
            self.act()
        return super().resolve_data(write_item)


class FailingInAHelperThread(DefaultSavePlanner):
    """Fails where PyTorch's writer looks for no error; its main thread writes too, and waits until that has happened."""

    def __init__(self):
        super().__init__()
        self.failed = threading.Event()

    def resolve_data(self, write_item):
        if threading.current_thread() is threading.main_thread():
            self.failed.wait(timeout=60)
            return super().resolve_data(write_item)
        self.failed.set()
        raise OSError(5, "Input/output error")


ON_FILES = {"open", "os.mkdir", "os.scandir", "os.listdir", "os.rename", "os.remove", "os.rmdir"}
"""What Python tells its audit hooks; ``os.replace`` and ``os.unlink`` come as ``os.rename`` and ``os.remove``."""


class DyingAt(DefaultSavePlanner):
    """Dies at the n-th of what it does: an item written, a file or folder of the checkpoint opened, renamed, removed."""

    def __init__(self, number, place):
        super().__init__()
        self.left, self.place = number, place
        sys.addaudithook(self.on_event)

    def resolve_data(self, write_item):
        self.count_down()
        return super().resolve_data(write_item)

    def on_event(self, event, arguments):
        if event in ON_FILES and str(arguments[0]).startswith(self.place):
            self.count_down()

    def count_down(self):
        self.left -= 1
        if self.left == 0:
            die()


class DyingBeforeItsShare(DefaultSavePlanner):
    """Dies when all is planned and nothing of this rank is written yet."""

    def finish_plan(self, new_plan):
        die()


class DoingOnce(DefaultLoadPlanner):
    """Does something when the first tensor has been read."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def commit_tensor(self, read_item, tensor):
        super().commit_tensor(read_item, tensor)
        act, self.act = self.act, lambda: None
        act()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# --- the faults ------------------------------------------------------------------------------------------------------


def error_in_a_writer_thread(side, place, bench):
    threads = {"threads": 4} if side == "ours" else {"thread_count": 4}
    went = save(side, place, 1.0, FailingInAHelperThread(), a_file_each=True, **threads)
    return f"{went}; {load(side, place)}"


def crash(side, place, bench):
    [(status, found)] = bench.run("crash", side, place)
    assert status == 0
    return found


def damage(side, place, change):
    save(side, place, 1.0)
    victim = max(Path(place).glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    change(data)
    victim.write_bytes(data)
    return load(side, place)


def flipped_bit(side, place, bench):
    def change(data):
        data[100_000] ^= 0x10

    return damage(side, place, change)


def truncated_object(side, place, bench):
    return damage(side, place, lambda data: data.__delitem__(slice(len(data) * 2 // 3, None)))


def size_right_and_bytes_wrong(side, place, bench):
    return damage(side, place, lambda data: data.__setitem__(slice(100_000, 104_096), bytes(4096)))


def disk_full(side, place, bench):
    with bench.disk("size=3m") as disk:
        save(side, f"{disk}/step", 1.0)
        Path(disk, "ballast").write_bytes(bytes(1_000_000))
        before = set(Path(disk).rglob("*"))
        went = save(side, f"{disk}/next", 2.0)
        left = [path for path in set(Path(disk).rglob("*")) - before if path.is_file()]
        return f"{went}; {'files of it stay' if left else 'nothing of it stays'}; {load(side, f'{disk}/step')}"


def answers_503(side, place, bench):
    url, options = bench.bucket()
    bench.proxy.set_faults({"method": "PUT", "status": 503, "times": 2})
    return f"{save(side, url, 1.0, options=options)}; {load(side, url, options=options)}"


def token_expiry(side, place, bench):
    url, options = bench.bucket()
    save(side, url, 1.0, options=options, a_file_each=True)

    def expire():
        bench.proxy.set_faults({"method": "PUT", "status": 403})

    went = save(side, url, 2.0, Doing(4, expire), options=options, a_file_each=True)
    bench.proxy.set_faults()
    return f"{went}; {load(side, url, options=options)}"


def killed_rank(side, place, bench):
    bench.run("rank", side, place, "1", ranks=2)
    (_, went), (status, _) = bench.run("rank", side, place, "2", "die", ranks=2)
    assert status == -signal.SIGKILL
    return f"on the other rank {went}; {load(side, place)}"


def two_savers(side, place, bench):
    went = []
    went.append(save(side, place, 1.0, Doing(4, lambda: went.append(save(side, place, 2.0)))))
    return f"{'both succeed' if all('succeeds' in w for w in went) else went}; {load(side, place)}"


def load_during_a_save(side, place, bench):
    save(side, place, 1.0, a_file_each=True)
    during = load(side, place, DoingOnce(lambda: save(side, place, 2.0, a_file_each=True)))
    return f"{during}; loaded again, {load(side, place)}"


def rank_lacks_a_key(side, place, bench):
    (_, first), (_, second) = bench.run("lack", side, place, ranks=2)
    return f"{f'on both ranks {first}' if first == second else (first, second)}; {load(side, place)}"


# --- processes of their own ------------------------------------------------------------------------------------------


def crash_everywhere(side, place):
    """Kill a second save at the first thing it does, then another at its second, until one comes to its end."""
    found, status, number = set(), signal.SIGKILL, 0
    while status == signal.SIGKILL:
        number += 1
        there = f"{place}/{number}"
        save(side, there, 1.0)
        child = os.fork()
        if child == 0:
            save(side, there, 2.0, DyingAt(number, there))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.add(load(side, there))
    assert status == 0
    return ", or ".join(sorted(found))


def main(act, side, place, *rest):
    warnings.simplefilter("ignore")
    if act == "crash":
        print(crash_everywhere(side, place))
        return
    *rest, rendezvous, rank = rest
    rank = int(rank)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    planner = None
    if act == "rank":
        value, *death = rest
        content = {name: tensor for name, tensor in state(float(value)).items() if int(name[1:]) % 2 == rank}
        if death and rank == 1:
            planner = DyingBeforeItsShare()
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = distribute_tensor(torch.ones(10), init_device_mesh("cpu", (2,)), [Shard(0)])
        content = {} if rank else {"x": whole}
    went = told("the save", lambda: dcp.save(content, storage_writer=writer(side, place), planner=planner))
    print(went, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
