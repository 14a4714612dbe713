"""Jobs of several ranks, state dicts to save, and ways to damage what was saved."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

PRELUDE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from airdata.checkpoint import *
root, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=world)
"""
# Without the barrier a rank may leave while another still speaks to it; without os._exit gloo aborts now and then.
POSTLUDE = """
if world > 1:
    dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Run a program as N ranks of one gloo job, each a process; returns what each printed."""

    def run(world: int, program: str, *arguments: str, timeout: float = 150) -> list[str]:
        rendezvous = tmp_path_factory.mktemp("job") / "rendezvous"
        source = PRELUDE + textwrap.dedent(program) + POSTLUDE
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", source, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "RENDEZVOUS": str(rendezvous),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(world)
        ]
        try:
            outputs = [process.communicate(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}: {errors[-3000:]}"
        return [output for output, _ in outputs]

    return run


@pytest.fixture
def make_state() -> Callable[..., dict[str, Any]]:
    """A state dict of many kinds of tensors and values; ``seed`` chooses the content, None makes zeros to load into."""

    def make(seed: int | None) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed or 0)

        def tensor(*shape: int) -> torch.Tensor:
            return torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator)

        return {
            "matrix": tensor(300, 200),
            "large": tensor(700, 500),
            "half": tensor(33).to(torch.bfloat16),
            "eighth": tensor(16).to(torch.float8_e4m3fn),
            "bools": tensor(7) > 0,
            "integers": (tensor(5) * 100).to(torch.int64),
            "complex": torch.complex(tensor(4), tensor(4)),
            "transposed": tensor(30, 50).t(),
            "view": tensor(100, 10)[10:20],
            "scalar": tensor(1)[0],
            "empty": torch.zeros(0, 3),
            "parameter": torch.nn.Parameter(tensor(9, 9)),
            "nested": {"list": [tensor(3), {"deep": tensor(2, 2)}], "number": seed, "text": f"seed {seed}"},
        }

    return make


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    """Compare two state dicts bit for bit."""

    def same(left: Any, right: Any, path: str = "state") -> None:
        if isinstance(left, dict):
            assert left.keys() == right.keys(), path
            for key in left:
                same(left[key], right[key], f"{path}.{key}")
        elif isinstance(left, (list, tuple)):
            assert len(left) == len(right), path
            for number, pair in enumerate(zip(left, right, strict=True)):
                same(*pair, f"{path}[{number}]")
        elif isinstance(left, torch.Tensor):
            assert (left.shape, left.dtype) == (right.shape, right.dtype), path
            assert (
                left.contiguous().flatten().view(torch.uint8).equal(right.contiguous().flatten().view(torch.uint8))
            ), path
        else:
            assert left == right, path

    return same


@pytest.fixture
def shards() -> Callable[[Path], Sequence[Path]]:
    """The shard files in a folder, largest first."""

    def find(folder: Path) -> Sequence[Path]:
        return sorted(folder.glob("*.distcp"), key=lambda path: -path.stat().st_size)

    return find


def flip(path: Path, position: int) -> None:
    """Invert one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


@pytest.fixture(name="flip")
def _flip() -> Callable[[Path, int], None]:
    return flip
