"""Train on files of a volume, lose a process, and lose nothing else."""

# %% [markdown]
# # Train on files of a volume, lose a process, and lose nothing else
#
# The 1,797 handwritten digits of scikit-learn are written as PNG files to a volume, one folder for each class. Two
# processes train a small network on them with DDP. In the middle one of them is killed with SIGKILL, as an
# out-of-memory killer would do it. The job is started again, goes on from its newest valid checkpoint at the very next
# sample, and a record of sample names proves that nothing was repeated and nothing was lost.
#
# As a script: `python examples/digits.py --help`. GPUs are used where there are any, gloo on the CPU otherwise.

# %%
from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

import airdata
import airdist
from airdist import distributed

TRAIN_FILES = 1408  # 22 batches of 64; the other 389 digits are held out
GLOBAL_BATCH = 64

# %% [markdown]
# ## The data: PNG files in class folders
# A path such as `/Volumes/main/demo/digits` is a mounted Unity Catalog volume on Databricks; anywhere else the variable
# `AIRDATA_VOLUMES` says which directory or bucket stands for `/Volumes`. A URL (`s3://…`) can be given in its place.


# %%
def write_digits(volume: str) -> None:
    """Write the digits to the volume, unless they are there."""
    import io

    import fsspec
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm.auto import tqdm

    filesystem, root = fsspec.core.url_to_fs(airdata.Volume.of(volume).url)
    digits = load_digits()
    if len(filesystem.find(root)) == len(digits.images):
        return
    train, _ = train_test_split(
        range(len(digits.images)), train_size=TRAIN_FILES, stratify=digits.target, random_state=0
    )
    in_train = set(train)
    for number, (image, label) in enumerate(zip(tqdm(digits.images, "writing PNG files"), digits.target, strict=True)):
        folder = f"{root}/{'train' if number in in_train else 'test'}/{label}"
        filesystem.makedirs(folder, exist_ok=True)
        png = io.BytesIO()
        Image.fromarray((image * 15.9375).astype("uint8")).save(png, "png")
        filesystem.pipe_file(f"{folder}/digit-{number:04d}.png", png.getvalue())


# %% [markdown]
# ## Decoding
# `UCVolumeDataset` yields paths on local disk whose end is the file's path in the volume, so the folder is the label. A
# second `IterableDataset` around it decodes.


# %%
class Digits(IterableDataset):
    """(image, label, name) of each file."""

    def __init__(self, files: airdata.UCVolumeDataset) -> None:
        self.files = files

    def __iter__(self):
        import numpy as np
        from PIL import Image

        for path in self.files:
            label, name = Path(path).parts[-2:]
            pixels = np.asarray(Image.open(path), dtype=np.float32) / 255
            yield torch.from_numpy(pixels)[None], int(label), f"{label}/{name}"


def network() -> nn.Module:
    """A small convolutional network for 8-by-8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 16, 10),
    )


# %% [markdown]
# ## The training function
# It is an ordinary function; `@distributed` runs it once in each process. "Load the newest valid checkpoint if there is
# one, else start" is the one line with `restore`.


# %%
@distributed(num_accelerators=2, timeout=600, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
def train(volume: str, checkpoints: str, record: str, epochs: int, save_every: int = 20) -> dict:
    """Train and return what this rank knows: the step it resumed from and the accuracy at the end."""
    import mlflow
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tqdm.auto import tqdm

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", airdist.runtime.get_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # another dropout in each rank
    torch.use_deterministic_algorithms(mode=True)  # so that the proof below can compare bits, on GPUs too

    files = airdata.UCVolumeDataset(f"{volume}/train", shuffle=True, seed=7, uneven="drop")
    loader = airdata.DataLoader(Digits(files), batch_size=GLOBAL_BATCH // world)
    held_out = airdata.DataLoader(Digits(airdata.UCVolumeDataset(f"{volume}/test")), batch_size=128)

    model = DistributedDataParallel(network().to(device), device_ids=[device] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    manager = airdata.CheckpointManager(checkpoints, keep_last=3)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": airdata.RNGState()}
    start = manager.restore(state) or 0
    step, accuracy, total = start, 0.0, epochs * (TRAIN_FILES // GLOBAL_BATCH)
    if rank == 0:
        print(f"resumed at step {start} of {total}" if start else f"starting; {total} steps to go")

    with (
        open(f"{record}-rank{rank}-from{start}.jsonl", "w", encoding="utf-8") as lines,
        tqdm(total=total, initial=start, desc="training", unit="step", disable=rank > 0) as bar,
    ):
        while step < total:
            for images, labels, names in loader:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.3f}")
                line = {"step": step, "epoch": (step - 1) * GLOBAL_BATCH // TRAIN_FILES, "names": names}
                lines.write(json.dumps({**line, "loss": loss.item(), "pid": os.getpid()}) + "\n")
                lines.flush()
                if rank == 0 and step % 5 == 0:
                    mlflow.log_metric("loss", loss.item(), step=step)
                if step % save_every == 0:
                    manager.save(step, state)
            accuracy = evaluate(model.module, held_out, device)
            if rank == 0:
                mlflow.log_metric("accuracy", accuracy, step=step)
                lines.write(json.dumps({"step": step, "accuracy": accuracy}) + "\n")
        manager.save(step, state)
        manager.close()
    dist.destroy_process_group()
    return {"resumed_from": start, "accuracy": accuracy, "data": str(loader.stats())}


def evaluate(model: nn.Module, loader: airdata.DataLoader, device: torch.device) -> float:
    """The share of held-out digits that are named right, over all ranks."""
    import torch.distributed as dist

    model.eval()
    right_and_seen = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels, _ in loader:
            guesses = model(images.to(device)).argmax(1).cpu()
            right_and_seen += torch.tensor([(guesses == labels).sum(), len(labels)], device=device)
    dist.all_reduce(right_and_seen)
    model.train()
    return (right_and_seen[0] / right_and_seen[1]).item()


# %% [markdown]
# ## The accident
# A thread of the notebook waits until the record shows a given step, then kills the last rank with SIGKILL: no handler
# runs, nothing is flushed, an asynchronous save may be half done.


# %%
def read_record(record: str) -> list[dict]:
    """Every complete line that any rank of any attempt wrote: step, epoch, names, loss, attempt."""
    entries = []
    for path in sorted(Path(record).parent.glob(f"{Path(record).name}-rank*.jsonl")):
        rank, start = (int(part) for part in path.stem.rsplit("-rank", 1)[1].split("-from"))
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        entries += [{**json.loads(line), "rank": rank, "from": start} for line in lines if line.endswith("\n")]
    return entries


def kill_a_rank_at(step: int, record: str) -> threading.Thread:
    """Kill the highest rank with SIGKILL once it has trained on ``step``."""

    def watch() -> None:
        while True:
            reached = [entry for entry in read_record(record) if entry["step"] >= step and "pid" in entry]
            if reached:
                victim = max(reached, key=lambda entry: entry["rank"])
                os.kill(victim["pid"], signal.SIGKILL)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


# %% [markdown]
# ## The proof
# What the model has learned from is: the first attempt up to the checkpoint from which the second went on, then the
# second attempt. In that history every epoch must hold every training file exactly once. The steps between the
# checkpoint and the kill were computed twice, so they also show whether the resumed run is the same run to the bit.


# %%
def prove(record: str, resumed_from: int, epochs: int) -> list[dict]:
    """Check the record and print what it shows; returns the history."""
    entries = [entry for entry in read_record(record) if "names" in entry]
    history = [e for e in entries if (e["from"] == 0) == (e["step"] <= resumed_from)]
    for epoch in range(epochs):
        names = [name for entry in history if entry["epoch"] == epoch for name in entry["names"]]
        assert len(names) == len(set(names)) == TRAIN_FILES, f"epoch {epoch}: {len(names)}, {len(set(names))} distinct"
    print(
        f"  exact     each of the {TRAIN_FILES} training files exactly once in each of {epochs} epochs, across the kill"
    )
    lost = {(e["rank"], e["step"]): e for e in entries if e["from"] == 0 and e["step"] > resumed_from}
    again = [(lost[key], e) for e in history if (key := (e["rank"], e["step"])) in lost]
    assert all(before["names"] == after["names"] for before, after in again)
    same = sum(before["loss"] == after["loss"] for before, after in again)
    print(
        f"  the same  {len(again)} batches were computed twice: same samples, {same} of {len(again)} losses bit for bit"
    )
    return history


def plot(record: str, resumed_from: int, path: str) -> None:
    """Loss and accuracy by step, with the kill and the resume marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    entries = [entry for entry in read_record(record) if entry["rank"] == 0]
    first = [entry for entry in entries if entry["from"] == 0 and "loss" in entry]
    second = [entry for entry in entries if entry["from"] == resumed_from and "loss" in entry]
    accuracy = {entry["step"]: entry["accuracy"] for entry in entries if "accuracy" in entry}
    killed = max(entry["step"] for entry in first)
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=[2, 1], layout="constrained")
    top.axvspan(resumed_from, killed, color="tab:red", alpha=0.1, lw=0, label="computed twice")
    top.plot([e["step"] for e in first], [e["loss"] for e in first], color="tab:orange", lw=2.5, label="first attempt")
    top.plot([e["step"] for e in second], [e["loss"] for e in second], color="tab:blue", lw=1.2, label="second attempt")
    top.axvline(killed, color="tab:red", lw=1.2, ls=":", label=f"SIGKILL at step {killed}")
    top.axvline(resumed_from, color="tab:green", lw=1.2, ls="--", label=f"resume at step {resumed_from}")
    top.set(ylabel="training loss, rank 0", yscale="log", title="Handwritten digits: killed, resumed, nothing lost")
    top.legend(fontsize="small")
    bottom.plot(list(accuracy), [100 * value for value in accuracy.values()], "o-", color="tab:blue")
    bottom.axvline(resumed_from, color="tab:green", lw=1.2, ls="--")
    bottom.set(xlabel="step", ylabel="held-out accuracy, %")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# %% [markdown]
# ## The whole job


# %%
def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run the job."""
    import argparse

    parser = argparse.ArgumentParser(description="Train on handwritten digits, be killed, resume, and lose nothing.")
    parser.add_argument("--volume", default="/Volumes/main/demo/digits", help="a volume path or any fsspec URL")
    parser.add_argument("--out", default=str(Path(__file__).parent / "out"), help="where records and plots go")
    parser.add_argument("--accelerators", type=int, help="processes (default: two; one on a machine with one GPU)")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    run_job(options.volume, options.out, options.accelerators, options.epochs)


def run_job(volume: str, out: str, accelerators: int | None = None, epochs: int = 8) -> None:
    """The job of this page, from files to plot."""
    import mlflow

    began = time.monotonic()
    work = Path(out).absolute() / time.strftime("digits-%Y%m%d-%H%M%S")
    work.mkdir(parents=True)
    os.environ.setdefault("AIRDATA_VOLUMES", str(Path(out).absolute() / "volumes"))
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{Path(out).absolute() / 'mlflow.db'}")
    record, checkpoints = str(work / "record"), f"{volume}-checkpoints/{work.name}"
    write_digits(volume)
    job = train.with_overrides(num_accelerators=accelerators or min(2, torch.cuda.device_count()) or 2)

    with mlflow.start_run(run_name=work.name) as run:
        print("\n— first attempt: a rank will be killed on the way —")
        kill_a_rank_at(step=epochs * 22 * 2 // 5, record=record)
        try:
            job.distributed(volume, checkpoints, record, epochs)
        except airdist.RankDiedError as error:
            print(f"\nas announced: {error}")
        print("\n— second attempt —")
        results = job.distributed(volume, checkpoints, record, epochs)

    resumed_from, final = results[0]["resumed_from"], results[0]["accuracy"]
    print(f"\n{100 * final:.1f} % of the held-out digits are named right, after {time.monotonic() - began:.0f} s")
    prove(record, resumed_from, epochs)
    plot(record, resumed_from, str(work / "digits.png"))
    print(f"  data      {results[0]['data']}")
    print(f"  volume    {airdata.Volume.of(volume).url}")
    print(f"  plot      {work / 'digits.png'}")
    print(f"  record    {record}-rank*.jsonl")
    print(f"  steps     {airdata.CheckpointManager(checkpoints).steps()} in {checkpoints}")
    print(f"  MLflow    run {run.info.run_id} in {os.environ['MLFLOW_TRACKING_URI']}")
    print(f"            look: mlflow ui --backend-store-uri {os.environ['MLFLOW_TRACKING_URI']}")
    assert final > 0.95, f"the network names only {100 * final:.1f} % of the held-out digits right"


if __name__ == "__main__":
    main()
