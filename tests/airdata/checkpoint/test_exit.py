"""A program that saves and simply ends: what it saved is there, or it says that it is not."""

import os
import subprocess
import sys

import pytest
import torch

from airdata.checkpoint import CheckpointManager

# Storage that answers only once the program is at its end, then slowly, and, as drivers do, from an executor.
LATE = """
import atexit, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
import fsspec
from fsspec.implementations.local import LocalFileSystem

ended = threading.Event()

class Late(LocalFileSystem):
    protocol = "late"
    def __init__(self, **options):
        super().__init__(**{**options, "auto_mkdir": True})
    def mkdir(self, *args, **options):
        self.slowly()
        super().mkdir(*args, **options)
    def put_file(self, *args, **options):
        self.slowly()
        return ThreadPoolExecutor(1).submit(super().put_file, *args, **options).result()
    def pipe_file(self, *args, **options):
        self.slowly()
        return ThreadPoolExecutor(1).submit(super().pipe_file, *args, **options).result()
    def slowly(self):
        assert ended.wait(60)
        time.sleep(0.1)
    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.removeprefix("late://"))

fsspec.register_implementation("late", Late, clobber=True)

def save(root):
    from airdata.checkpoint import CheckpointManager
    # After the manager's own, so before them.
    atexit.register(ended.set)
    threading._register_atexit(ended.set)
    future = CheckpointManager("late://" + root).save(7, {"weights": [torch.arange(100.0)] * 3})
    assert not future.done()
"""
PLAIN = """
import sys
save(sys.argv[1])
"""
RANK = """
import sys
from airdist import distributed
if __name__ == "__main__":
    distributed(num_accelerators=1, tracking=False)(save).distributed(sys.argv[1])
"""


def run(tmp_path, program):
    script = tmp_path / "program.py"
    (tmp_path / "late.py").write_text(LATE)  # a module, which ranks import: an event cannot be sent to them
    script.write_text("from late import save\n" + program)
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_"))
    }
    return subprocess.run(
        [sys.executable, script, str(tmp_path / "c")],
        env={**own, "CUDA_VISIBLE_DEVICES": "", "AIRDIST_RUN_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("program", [PLAIN, RANK], ids=["plain", "rank"])
def test_a_save_that_is_under_way_when_the_program_ends_is_finished(program, tmp_path):
    ended = run(tmp_path, program)
    assert ended.returncode == 0, ended.stderr
    assert "saving step" not in ended.stdout + ended.stderr
    manager = CheckpointManager(tmp_path / "c")
    assert manager.latest() == 7, ended.stdout + ended.stderr
    manager.verify(7)
    state = {"weights": [torch.zeros(100)] * 3}
    assert manager.restore(state) == 7
    assert torch.equal(state["weights"][2], torch.arange(100.0))


@pytest.mark.parametrize("program", [PLAIN, RANK], ids=["plain", "rank"])
def test_a_save_that_fails_when_the_program_ends_is_an_error_in_the_log(program, tmp_path):
    (tmp_path / "c").write_text("in the way")
    ended = run(tmp_path, program)
    assert (ended.stdout + ended.stderr).count("saving step 7 under") == 1
