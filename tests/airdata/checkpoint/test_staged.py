import os
import signal
import subprocess
import sys
import threading

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from airdata.checkpoint import UCVolumeWriter
from airdata.checkpoint.staged import remove_abandoned, staged_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DIES_SENDING = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import fsspec, torch, torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from airdata.checkpoint import UCVolumeWriter

class Deadly(MemoryFileSystem):
    protocol = "deadly"
    def put_file(self, *args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

fsspec.register_implementation("deadly", Deadly, clobber=True)
dcp.save({"x": torch.ones(1000)}, storage_writer=UCVolumeWriter("deadly://a", staging_dir=sys.argv[1], memory_bytes=1))
"""


class Looking(MemoryFileSystem):
    """Notes what lies in the staging directory while a file goes up."""

    protocol = "looking"
    seen = ()

    def put_file(self, local, remote, **options):
        Looking.seen = os.listdir(os.path.dirname(local))
        super().put_file(local, remote, **options)


def test_what_a_killed_save_had_staged_is_removed_by_the_next_one_and_what_others_stage_is_not(tmp_path):
    process = subprocess.run([sys.executable, "-c", DIES_SENDING, str(tmp_path)], check=False, timeout=120)
    assert process.returncode == -signal.SIGKILL
    [left] = os.listdir(tmp_path)
    (tmp_path / "airdata-staged-notes.distcp").write_bytes(b"precious")
    fsspec.register_implementation("looking", Looking, clobber=True)
    with staged_file(str(tmp_path)) as (_, others):
        writer = UCVolumeWriter("looking://a", staging_dir=tmp_path, memory_bytes=1)
        dcp.save({"x": torch.ones(1000)}, storage_writer=writer)
        assert left not in Looking.seen
        assert os.path.basename(others) in Looking.seen
        assert len(Looking.seen) == 3
    assert os.listdir(tmp_path) == ["airdata-staged-notes.distcp"]


def test_files_made_while_others_look_for_abandoned_ones_keep_their_names(tmp_path):
    done = threading.Event()

    def look():
        while not done.is_set():
            remove_abandoned(str(tmp_path))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(300):
            with staged_file(str(tmp_path)) as (sink, path):
                sink.write(b"%d" % number)
                sink.flush()
                with open(path, "rb") as again:
                    assert again.read() == b"%d" % number
    finally:
        done.set()
        for thread in threads:
            thread.join(timeout=60)
    assert os.listdir(tmp_path) == []
