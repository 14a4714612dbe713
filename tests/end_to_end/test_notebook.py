"""A notebook as a person uses it: a real kernel that is sent cells, interrupted, and killed."""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, field

import psutil
import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="drives a kernel through jupyter_client")
pytest.importorskip("ipykernel", reason="needs a kernel to drive")

SLACK = 10.0  # what a busy machine may add to the five seconds of the design
CELL_SECONDS = 120.0


@dataclass
class Cell:
    """What one cell brought forth.

    Attributes:
        text: what appeared below it.
        error: name of the exception that ended it, or "".
        traceback: that exception as the notebook shows it, without colours.
    """

    text: str = ""
    error: str = ""
    traceback: str = ""


@dataclass
class Notebook:
    """A kernel, and the cells that are sent to it."""

    manager: jupyter_client.KernelManager
    client: jupyter_client.BlockingKernelClient
    strays: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.pid)

    def send(self, source: str) -> str:
        return self.client.execute(textwrap.dedent(source))

    def follow(self, sent: str, seconds: float = CELL_SECONDS) -> Cell:
        """Everything that appears until the cell is idle; what belongs to other cells is a stray."""
        cell = Cell()
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            assert left > 0, f"the cell did not end within {seconds} s; so far:\n{cell.text}"
            try:
                message = self.client.get_iopub_msg(timeout=min(left, 1))
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != sent:
                if kind == "stream":
                    self.strays.append(content["text"])
            elif kind == "stream":
                cell.text += content["text"]
            elif kind == "execute_result":
                cell.text += content["data"]["text/plain"] + "\n"
            elif kind == "error":
                cell.error = content["ename"]
                cell.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def run(self, source: str) -> Cell:
        """Run a cell that must succeed."""
        cell = self.follow(self.send(source))
        assert not cell.error, f"{cell.text}\n{cell.traceback}"
        return cell


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = jupyter_client.KernelManager(kernel_name="python3", connection_file=str(tmp_path / "kernel.json"))
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=CELL_SECONDS)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def living(processes):
    def lives(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]


def test_the_documented_example_runs_cell_by_cell(notebook):
    # Given a model, a data set and helpers in cells of their own, as the documentation has them.
    notebook.run("""
        import torch, torch.nn as nn
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        from airdist import distributed
        """)
    notebook.run("""
        class SimpleMLP(nn.Module):
            def __init__(self, input_dim=10, hidden_dim=16, output_dim=1):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(input_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, output_dim))

            def forward(self, x):
                return self.net(x)
        """)
    notebook.run("""
        def setup():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

        def cleanup():
            dist.destroy_process_group()

        def make_loader(samples, batch_size):
            torch.manual_seed(0)
            x = torch.randn(samples, 10)
            data = TensorDataset(x, x.sum(1, keepdim=True))
            return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
        """)
    notebook.run("""
        @distributed(num_accelerators=2)
        def run_train(num_epochs: int, batch_size: int):
            setup()
            model = DDP(SimpleMLP())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            loader = make_loader(256, batch_size)
            for epoch in range(num_epochs):
                loader.sampler.set_epoch(epoch)
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                print(f"epoch {epoch}: loss {loss.item():.3f}")
            cleanup()
            return model.module
        """)
    # When it is launched from another cell.
    cell = notebook.run("results = run_train.distributed(num_epochs=3, batch_size=32)")
    # Then its output is below that cell, with the run's link, and nowhere else.
    assert "[rank 0] epoch 2: loss" in cell.text
    assert "[airdist] run_train: 2 processes on CPU; logs: " in cell.text
    assert "MLflow run: " in cell.text
    # And the values are objects of the notebook's own class, equal in all ranks.
    cell = notebook.run("""
        first, second = (model.state_dict() for model in results)
        print(all(type(model) is SimpleMLP for model in results), all(torch.equal(first[k], second[k]) for k in first))
        results
        """)
    assert cell.text.startswith("True True\nResults, a list by rank (2)\n  rank 0: ")
    assert not notebook.strays


def test_an_exception_of_the_notebook_is_caught_and_an_uncaught_one_shows_the_users_lines(notebook):
    notebook.run("""
        from airdist import distributed
        class DivergedError(Exception):
            def __init__(self, step, *, loss):
                super().__init__(f"step {step}")
                self.loss = loss
        """)
    notebook.run("""
        @distributed(num_accelerators=2, tracking=False)
        def diverges():
            raise DivergedError(7, loss=float("inf"))  # the very line
        """)
    cell = notebook.run("""
        try:
            diverges.distributed()
        except DivergedError as error:
            print("CAUGHT", error, error.loss)
        """)
    assert "CAUGHT step 7 inf" in cell.text
    cell = notebook.follow(notebook.send("diverges.distributed()"))
    assert cell.error == "DivergedError"
    assert 'raise DivergedError(7, loss=float("inf"))  # the very line' in cell.traceback
    assert "rank.py" not in cell.traceback


def test_launches_are_awaited_in_a_cell(notebook):
    # Given the running event loop of a notebook.
    cell = notebook.run("""
        import asyncio
        from airdist import distributed
        twice = distributed(num_accelerators=1, tracking=False)(lambda x: 2 * x)
        print([list(r) for r in await asyncio.gather(twice.submit(1), twice.submit(2))])
        """)
    assert cell.text == "[[2], [4]]\n"


def test_a_progress_bar_redraws_itself_below_the_cell(notebook):
    cell = notebook.run("""
        from airdist import distributed
        @distributed(num_accelerators=1, tracking=False)
        def steps():
            import time
            from tqdm.auto import tqdm
            for _ in tqdm(range(40), desc="steps"):
                time.sleep(0.02)
        steps.distributed()
        """)
    frames = [frame for frame in re.split(r"[\r\n]", cell.text) if frame.startswith("steps:")]
    assert "40/40" in frames[-1]
    assert 2 <= len(frames) <= 12, frames  # of the 40 that the rank drew
    ends = [line for line in cell.text.split("\n") if "40/40" in line]
    assert len(ends) == 1


FOREVER = """
import os
from airdist import distributed

@distributed(num_accelerators=2, tracking=False)
def forever():
    import ctypes, signal, subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} {child.pid} {os.getppid()}\\n")
    BLOCK
"""
IN_PYTHON = "time.sleep(600)"
IN_C = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ctypes.CDLL(None).pause()"


def family(tmp_path):
    """The ranks, their children and their agent, once both ranks have reported."""
    pids = tmp_path / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split("\n")) == 3, 60, "both ranks report")
    return [psutil.Process(pid) for pid in {int(word) for word in pids.read_text().split()}]


def test_an_interrupted_cell_ends_its_ranks_and_the_kernel_goes_on(notebook, tmp_path):
    notebook.run(FOREVER.replace("BLOCK", IN_PYTHON))
    before = notebook.run("import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))")
    sent = notebook.send("forever.distributed()")
    processes = family(tmp_path)
    assert len(processes) == 5
    # When the stop button is pressed.
    notebook.manager.interrupt_kernel()
    cell = notebook.follow(sent, 5 + SLACK)
    # Then the cell ends as an interrupted cell does, nothing is left, and the kernel is as it was.
    assert cell.error == "KeyboardInterrupt"
    assert not living(processes)
    assert notebook.run("print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))") == before
    again = notebook.run("print(list(distributed(num_accelerators=1, tracking=False)(abs).distributed(-1)))")
    assert again.text.endswith("[1]\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the clean-up of orphans relies on Linux")
@pytest.mark.parametrize("block", [IN_PYTHON, IN_C])
def test_a_killed_kernel_leaves_no_process(notebook, tmp_path, block):
    notebook.run(FOREVER.replace("BLOCK", block))
    notebook.send("forever.distributed()")
    processes = family(tmp_path)
    os.kill(notebook.kernel.pid, signal.SIGKILL)
    wait_for(lambda: not living(processes), 5 + SLACK, "ranks, their children and the agent have ended")
