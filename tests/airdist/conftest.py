"""A place for run directories, and a way to run a program as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

OUTER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AIRDIST_LAUNCH_DIR"}


@pytest.fixture
def cpu_world(tmp_path, monkeypatch):
    """Launches use CPU processes and leave their run directories under the returned path."""
    for name in OUTER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("AIRDIST_RUN_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def run_script(tmp_path, cpu_world):
    """Run a program in a process of its own and return what it printed; it must succeed."""

    def run(body: str, *, argv: tuple[str, ...] = (), timeout: float = 120, **env: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(body))
        done = subprocess.run(
            [sys.executable, *(argv or (str(script),))],
            env={**os.environ, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
