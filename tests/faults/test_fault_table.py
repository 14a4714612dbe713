"""What the user sees when saving or loading goes wrong: ours against what PyTorch brings, as a page.

Every fault is made to happen, on both sides, and what came of it is put in words; ``docs/faults.md`` is those words.
``AIRDATA_WRITE_FAULTS=1 pytest tests/faults/test_fault_table.py`` writes it anew.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import checkpoint_faults as acts
import pytest
import torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

PAGE = Path(__file__).parents[2] / "docs/faults.md"

# What happens, and what ours must answer.
FAULTS = {
    "a writer thread gets an I/O error": (acts.error_in_a_writer_thread, f"the save fails: `CheckpointError`; {acts.NOTHING}"),
    "the process is killed in a save to the same path, at each of its steps in turn": (acts.crash, f"{acts.FIRST}, or {acts.SECOND}"),
    "a bit of a stored file flips": (acts.flipped_bit, "the load fails: `CorruptCheckpointError`"),
    "a stored file is cut short": (acts.truncated_object, "the load fails: `CorruptCheckpointError`"),
    "a stored file has the right size and 4 KB of zeros": (acts.size_right_and_bytes_wrong, "the load fails: `CorruptCheckpointError`"),
    "the disk is full": (acts.disk_full, f"the save fails: `StagingFullError`; nothing of it stays; {acts.FIRST}"),
    "the store answers 503 twice": (acts.answers_503, f"the save succeeds; {acts.FIRST}"),
    "the token expires in the middle of a save to the same path": (acts.token_expiry, f"the save fails: `CheckpointError`; {acts.FIRST}"),
    "a rank is killed before it wrote its share, in a save to the same path": (acts.killed_rank, f"on the other rank the save fails: `RuntimeError`; {acts.FIRST}"),
    "two jobs save to one path at the same time, and the first ends last": (acts.two_savers, f"both succeed; {acts.FIRST}"),
    "a checkpoint is replaced while it is being loaded": (acts.load_during_a_save, f"the load fails: `CheckpointError`; loaded again, {acts.SECOND}"),
    "a rank lacks its share of a tensor when saving": (acts.rank_lacks_a_key, f"on both ranks the save fails: `ValueError`; {acts.NOTHING}"),
}  # fmt: skip


HEAD = """# What goes wrong, and what you see

Each fault was made to happen, to `UCVolumeWriter` and `UCVolumeReader` and to the writer and reader that PyTorch {version}
brings for the same place (`FileSystemWriter` and `FileSystemReader`, `FsspecWriter` and `FsspecReader` on S3). The first save
holds ones and the second twos, so that a mix of both shows. `CheckpointManager.restore` passes over steps that are missing
or damaged, says in the log why, and restores the newest that is whole.

| fault | airdata | PyTorch |
|---|---|---|
"""
TAIL = """
## When ranks are killed

Whichever ranks of a job are killed, and whenever: the others raise `CheckpointError` as soon as they hear of it, at the
latest after the `timeout` of their `CheckpointManager`, and a new job, of any number of ranks, restores the newest step that
was published. The tests kill hundreds of jobs of one to three ranks at random moments and compare every bit
(`pytest -m slow tests/faults -k kills`).

A killed save leaves files that no checkpoint names, in the folder of its step: `__<rank>_<n>.<save id>.distcp`,
`.integrity.<save id>.json` and, in a directory, `.airdata-<chance>.part`. Nothing takes them for a checkpoint. Another job might
be writing them still, so they go with the first save to that path, or (unless `keep_last=None`) the first later step, that is
published a day after.
A rank that survives without having heard how the save ended leaves its files too: rank 0 may be about to publish them.
What a killed process had staged on local disk is removed by the next save that stages there.

A FUSE mount cannot rename in one act, so there `.metadata` is written in place. A kill in that very moment, while a step is
saved again, leaves that step damaged, and the one before it is restored.
"""


class Bench:
    """What the faults need: other processes, a small disk, a store that misbehaves."""

    def __init__(self, folder, proxy, volume):
        self.folder, self.proxy, self._volume, self._count = folder, proxy, volume, 0

    def number(self):
        self._count += 1
        return self._count

    def bucket(self):
        options = {**self._volume.storage_options, "endpoint_url": self.proxy.url}
        return f"{self._volume.url}/{self.number()}", options

    def run(self, *arguments, ranks=1):
        meet = str(self.folder / f"meet{self.number()}")
        commands = [
            [sys.executable, acts.__file__, *arguments, *([meet, str(r)] if ranks > 1 else [])] for r in range(ranks)
        ]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ) for c in commands]  # fmt: skip
        outputs = []
        try:
            for process in processes:
                outputs += [process.communicate(timeout=120)[0].strip()]
        finally:
            for process in processes:
                process.kill()
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]

    @contextlib.contextmanager
    def disk(self, options):
        directory = self.folder / f"disk{self.number()}"
        directory.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
        try:
            yield str(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


@pytest.fixture(scope="module")
def outcomes():
    return {}


@pytest.fixture
def bench(tmp_path, s3_proxy, s3_volume):
    return Bench(tmp_path, s3_proxy, s3_volume)


@pytest.mark.parametrize("fault", FAULTS)
def test_ours_is_right_and_says_so(fault, bench, tmp_path, outcomes):
    act, expected = FAULTS[fault]
    outcomes[fault] = {side: act(side, str(tmp_path / side), bench) for side in ("ours", "stock")}
    assert outcomes[fault]["ours"] == expected
    assert "silently" not in outcomes[fault]["ours"]


def test_the_page_is_what_the_run_says(outcomes):
    if outcomes.keys() != FAULTS.keys():
        pytest.skip("some faults were not run")
    version = torch.__version__.partition("+")[0]
    rows = [f"| {fault} | {outcomes[fault]['ours']} | {outcomes[fault]['stock']} |" for fault in FAULTS]
    page = HEAD.format(version=version) + "\n".join(rows) + "\n" + TAIL
    if os.environ.get("AIRDATA_WRITE_FAULTS"):
        PAGE.write_text(page)
    if f"PyTorch {version}\n" not in PAGE.read_text():
        pytest.skip("the page was written with another version of PyTorch")
    assert PAGE.read_text() == page
