import contextlib
import copy
import functools
import logging
import random
import re
import threading
import time

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from airdata.checkpoint import CheckpointManager, KeepBest, Pinned, RNGState, SaveSummary, manager
from airdata.checkpoint.layout import step_name
from airdata.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from airdata.metrics import Reporter
from airdata.volume import Volume

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:checkpoints under"),
]


class Loader:
    """Stands where the data loader stands: a position, and a little buffer."""

    def __init__(self):
        self.position = 0
        self.seen = {}

    def state_dict(self):
        return {"version": 1, "position": self.position, "seen": self.seen, "tensor": torch.tensor([self.position])}

    def load_state_dict(self, state_dict):
        assert state_dict["tensor"].item() == state_dict["position"]
        self.position = state_dict["position"]
        self.seen = state_dict["seen"]


class Job:
    """A small training job."""

    def __init__(self, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Loader()
        self.history = []
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": RNGState(),
            "history": self.history,
            "best": float("inf"),
            "name": "job",
        }

    def train(self, steps=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(16, 8) + random.random() + np.random.rand()).pow(2).mean()  # noqa: NPY002
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.loader.position += 16
            self.loader.seen[self.loader.position] = [loss.item()]
            self.history.append(loss.item())
            self.state["best"] = min(self.state["best"], loss.item())
        return self

    def snapshot(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "loader": self.loader.state_dict(),
                "history": self.history,
                "best": self.state["best"],
            }
        )


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "fused": (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_restored_job_goes_on_bit_for_bit(kind, trained, async_save, tmp_path, assert_same):
    optimizer, options = OPTIMIZERS[kind]
    job = Job(optimizer, **options).train(trained)
    with CheckpointManager(tmp_path, async_save=async_save) as manager:
        manager.save(trained, job.state)
        saved = job.snapshot()
        future = job.train(4).snapshot()
    other = Job(optimizer, **options).train(1 if trained else 0)
    history = other.history
    torch.manual_seed(77)
    assert CheckpointManager(tmp_path).restore(other.state) == trained
    assert_same(other.snapshot(), saved)
    assert other.state["history"] is history
    assert_same(other.train(4).snapshot(), future)


def test_saving_an_optimizer_before_its_first_step_leaves_it_alone(tmp_path):
    job = Job()
    CheckpointManager(tmp_path, async_save=False).save(0, job.state)
    assert not job.optimizer.state


def test_a_parameter_without_a_gradient_needs_no_state(tmp_path, assert_same):
    def make():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    CheckpointManager(tmp_path, async_save=False).save(1, {"model": model, "optimizer": optimizer})
    other, other_optimizer = make()
    CheckpointManager(tmp_path).restore({"model": other, "optimizer": other_optimizer})
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_without_a_checkpoint_restore_is_none_and_touches_nothing(tmp_path, assert_same):
    job = Job()
    before = job.snapshot()
    assert CheckpointManager(tmp_path / "new").restore(job.state) is None
    assert CheckpointManager(tmp_path / "new").latest() is None
    assert_same(job.snapshot(), before)


@pytest.mark.parametrize("place", ["directory", "memory", "s3"])
def test_steps_are_kept_and_removed_as_asked(place, tmp_path, s3_volume):
    root = {"directory": tmp_path, "memory": f"memory://manager/{tmp_path.name}", "s3": s3_volume}[place]
    with CheckpointManager(root, keep_last=2, keep_every=10) as manager:
        for step in (10, 11, 12, 13):
            manager.save(step, {"x": torch.full((3,), float(step)), "step": step})
    assert manager.steps() == [10, 12, 13]
    assert manager.latest() == 13
    state = {"x": torch.zeros(3), "step": 0}
    assert CheckpointManager(root).restore(state) == 13
    assert (state["x"].tolist(), state["step"]) == ([13.0] * 3, 13)


def test_later_changes_do_not_show_in_an_async_save(tmp_path):
    state = {"x": torch.ones(200_000), "list": [1], "model": nn.Linear(300, 300)}
    weight = state["model"].weight.detach().clone()
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            state["x"].fill_(step)
            manager.save(step, state)
            state["x"].fill_(-1)
            state["list"].append(2)
            state["model"].weight.data.zero_()
    target = {"x": torch.zeros(200_000), "list": [], "model": nn.Linear(300, 300)}
    for step in (0, 1, 2):
        assert CheckpointManager(tmp_path).restore(target, step) == step
        assert bool((target["x"] == step).all())
        assert target["list"] == [1] + [2] * step
        if step == 0:
            assert torch.equal(target["model"].weight, weight)


# --- damage --------------------------------------------------------------------------------------------------------


def saved_steps(root, *steps):
    with CheckpointManager(root, keep_last=None) as manager:
        for step in steps:
            manager.save(step, {"x": torch.full((10_000,), float(step)), "y": torch.full((5,), float(step))})
    return manager


def target():
    return {"x": torch.zeros(10_000), "y": torch.zeros(5)}


DAMAGE = [
    "shard flipped",
    "shard missing",
    "shard short",
    "record missing",
    "record flipped",
    "metadata flipped",
    "metadata empty",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_restore_walks_back_to_the_newest_valid_checkpoint(damage, tmp_path, flip, caplog):
    saved_steps(tmp_path, 1, 2, 3)
    folder = tmp_path / step_name(3)
    kind, what = damage.split()
    pattern = {"shard": "*.distcp", "record": ".integrity.*.json", "metadata": ".metadata"}[kind]
    [victim] = folder.glob(pattern)
    if what == "flipped":
        flip(victim, victim.stat().st_size // 2)
    elif what == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1] if what == "short" else b"")
    state = target()
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(tmp_path).restore(state) == 2
    assert bool((state["x"] == 2).all())
    assert bool((state["y"] == 2).all())
    assert "step 3 is skipped" in caplog.text
    assert victim.exists() or what == "missing"  # evidence is never removed


@pytest.mark.parametrize("content", ["nothing", "shards only", "a strange name"])
def test_what_is_not_published_is_not_seen(content, tmp_path):
    saved_steps(tmp_path, 1)
    other = tmp_path / ("step-00000009.bak" if content == "a strange name" else step_name(9))
    other.mkdir()
    if content != "nothing":
        for path in (tmp_path / step_name(1)).iterdir():
            if content == "a strange name" or path.suffix == ".distcp":
                (other / path.name).write_bytes(path.read_bytes())
    manager = CheckpointManager(tmp_path)
    assert manager.steps() == [1]
    assert manager.restore(target()) == 1


def test_when_no_checkpoint_is_valid_training_does_not_start_afresh(tmp_path):
    saved_steps(tmp_path, 1, 2)
    for victim in tmp_path.glob("*/*.distcp"):
        victim.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint under .* is valid.*missing.*missing"):
        CheckpointManager(tmp_path).restore(target())


def test_a_checkpoint_that_does_not_fit_is_an_error_and_not_skipped(tmp_path):
    saved_steps(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match="has no 'z'; it holds x, y"):
        CheckpointManager(tmp_path).restore({**target(), "z": 1})
    with pytest.raises(CheckpointError, match="Size mismatch"):
        CheckpointManager(tmp_path).restore({"x": torch.zeros(3)})


def test_verify_reads_every_byte(tmp_path, flip):
    manager = saved_steps(tmp_path, 1)
    manager.verify(1)
    [shard] = (tmp_path / step_name(1)).glob("*.distcp")
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match=shard.name):
        manager.verify(1)
    with pytest.raises(CheckpointNotFoundError, match=step_name(2)):
        manager.verify(2)


# --- failing saves ---------------------------------------------------------------------------------------------------


def blocked(tmp_path, step):
    """A root under which one step cannot be written, root user or not: a file stands where its folder must be."""
    (tmp_path / step_name(step)).write_text("in the way")


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_failed_async_save_is_raised_by_the_next_call(call, tmp_path):
    blocked(tmp_path, 2)
    manager = CheckpointManager(tmp_path)
    manager.save(1, target())
    future = manager.save(2, target())
    assert isinstance(future.exception(timeout=60), CheckpointError)
    with pytest.raises(CheckpointError, match=r"saving step 2 failed on rank 0.*File exists"):
        manager.save(3, target()) if call == "save" else getattr(manager, call)()
    manager.save(3, target())
    manager.close()
    assert manager.steps() == [1, 3]
    assert (tmp_path / step_name(2)).read_text() == "in the way"


def test_a_failed_sync_save_is_raised_at_once_and_old_checkpoints_stay(tmp_path):
    blocked(tmp_path, 2)
    manager = CheckpointManager(tmp_path, keep_last=1, async_save=False)
    manager.save(1, target())
    with pytest.raises(CheckpointError):
        manager.save(2, target())
    assert manager.steps() == [1]


def test_a_step_that_is_asked_for_is_loaded_or_refused_and_never_replaced_by_another(tmp_path, flip):
    manager = saved_steps(tmp_path, 1, 2, 3)
    state = target()
    assert manager.restore(state, 2) == 2
    assert bool((state["x"] == 2).all())
    with pytest.raises(CheckpointNotFoundError, match=step_name(9)):
        manager.restore(state, 9)
    [shard] = (tmp_path / step_name(2)).glob("*.distcp")
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        manager.restore(state, 2)


def test_an_error_of_the_body_is_not_hidden_by_that_of_the_save(tmp_path):
    blocked(tmp_path, 2)

    def body():
        with CheckpointManager(tmp_path) as manager:
            manager.save(2, target())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path, async_save=False)
    manager.save(1, {"x": torch.ones(3)})
    manager.save(1, {"x": torch.zeros(3)})
    state = {"x": torch.ones(3)}
    assert manager.restore(state) == 1
    assert state["x"].sum() == 0
    assert len(list((tmp_path / step_name(1)).iterdir())) == 3


def test_the_result_of_a_save_is_at_hand(tmp_path):
    manager = CheckpointManager(tmp_path)
    summary = manager.save(1, target()).result(timeout=60)
    assert isinstance(summary, SaveSummary)
    assert summary == manager.last_save
    assert summary.bytes > 40_000


@pytest.mark.parametrize(
    "state", [{"a": {"model": nn.Linear(1, 1)}}, {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}]
)
def test_a_state_that_cannot_be_restored_is_refused_before_anything_is_written(state, tmp_path):
    with pytest.raises(TypeError, match=r"top of the state|put the module"):
        CheckpointManager(tmp_path).save(1, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": -1}])
def test_retention_that_keeps_nothing_is_refused(options, tmp_path):
    with pytest.raises(ValueError, match="must be positive"):
        CheckpointManager(tmp_path, **options)
    with pytest.raises(ValueError, match="negative"):
        CheckpointManager(tmp_path).save(-1, target())


@pytest.mark.filterwarnings("default:checkpoints under")
@pytest.mark.parametrize("root", ["/tmp/x", "/Workspace/Users/me", "/dbfs/x", "/dev/shm/x", "/data/x", "/tmpfs/x"])
def test_roots_that_do_not_last_are_warned_of_once(root, recwarn):
    manager._warn_once.cache_clear()
    for _ in range(2):
        CheckpointManager(Volume.of(root))
    warned = [w for w in recwarn if "may not outlive" in str(w.message)]
    assert len(warned) == (root not in {"/data/x", "/tmpfs/x"})
    assert all(w.filename == __file__ for w in warned)


# --- early proof, reports --------------------------------------------------------------------------------------------


class LyingVolume(MemoryFileSystem):
    """A store that keeps the size of what it is given and loses a byte of each shard file."""

    protocol = "lying"
    store = {}  # noqa: RUF012 - the base class's design
    pseudo_dirs = [""]  # noqa: RUF012
    honest = True

    def pipe_file(self, path, value, **options):
        if not self.honest and ".distcp" in path:
            value = value[:-1] + bytes([value[-1] ^ 1])
        super().pipe_file(path, value, **options)


fsspec.register_implementation("lying", LyingVolume, clobber=True)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_store_that_loses_bytes_is_found_out_by_the_first_save_and_nothing_older_goes(
    async_save, tmp_path, monkeypatch
):
    root = f"lying://{tmp_path.name}/run"
    CheckpointManager(root, async_save=False).save(1, target())
    monkeypatch.setattr(LyingVolume, "honest", False)
    manager = CheckpointManager(root, keep_last=1, async_save=async_save)
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        manager.save(2, target()).result(timeout=60)
    assert manager.steps() == [1, 2]
    assert CheckpointManager(root).restore(target()) == 1
    unproved = CheckpointManager(root, async_save=False, prove_first=False)
    unproved.save(3, target())


def test_only_the_first_save_of_a_manager_is_read_back_and_the_time_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "airdata.checkpoint"), CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, target())
    proofs = [record.message for record in caplog.records if "was read back" in record.message]
    assert len(proofs) == 1
    assert "step-00000000: the first save" in proofs[0]
    assert "it took" in proofs[0]


class Gate:
    """A value whose pickling waits, so that a save lasts as long as the test says."""

    opened = threading.Event()

    def __reduce__(self):
        assert self.opened.wait(timeout=60)
        return Gate, ()

    def __deepcopy__(self, memo):
        return self


def test_saves_that_are_due_before_the_last_one_is_done_are_warned_of(tmp_path, caplog):
    Gate.opened.clear()
    with caplog.at_level(logging.WARNING, "airdata.checkpoint"), CheckpointManager(tmp_path) as manager:
        manager.save(1, {"gate": Gate()})
        timer = threading.Timer(0.2, Gate.opened.set)
        timer.start()
        manager.save(2, target()).result(timeout=60)
        manager.save(3, target())
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert re.search(r"step 2 was due \d+\.\d s after .* training waited", warnings[0])


def test_what_stays_can_be_composed(tmp_path):
    policies = [KeepBest("accuracy", "max"), Pinned([1])]
    with CheckpointManager(tmp_path, keep_last=1, keep=policies) as manager:
        for step, accuracy in enumerate([0.1, 0.2, 0.9, 0.8, 0.7]):
            manager.save(step, target(), metrics={"accuracy": accuracy})
    assert manager.steps() == [1, 2, 4]


@pytest.mark.parametrize("how", ["active run", "environment"])
def test_the_numbers_of_saves_reach_the_mlflow_run(how, tmp_path, monkeypatch):
    import mlflow

    with contextlib.ExitStack() as stack:
        if how == "active run":
            run = stack.enter_context(mlflow.start_run())
        else:
            run = mlflow.MlflowClient().create_run(mlflow.MlflowClient().create_experiment("saves"))
            monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, target())
    found = mlflow.get_run(run.info.run_id).data.metrics
    names = {"seconds", "bytes", "gb_per_second", "stall_seconds"}
    assert set(found) == {f"checkpoint_{name}" for name in names}
    assert found["checkpoint_bytes"] == manager.last_save.bytes
    assert found["checkpoint_seconds"] == pytest.approx(manager.last_save.seconds)


def test_the_numbers_of_an_async_save_reach_the_run_without_another_call(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setattr(manager, "Reporter", functools.partial(Reporter, interval=0.05))
    with mlflow.start_run() as run:
        saving = CheckpointManager(tmp_path)
        summary = saving.save(1, target()).result(timeout=60)
    deadline = time.monotonic() + 60
    while "checkpoint_bytes" not in (found := mlflow.get_run(run.info.run_id).data.metrics):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert found["checkpoint_bytes"] == summary.bytes
    saving.close()


# --- several ranks ---------------------------------------------------------------------------------------------------

JOB = """
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, StateDictOptions
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mode, kind = sys.argv[2:4]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 7))
    if kind == "fsdp" and world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=.01)
    counter = PerRank({"rank": rank})
    state = {"model": model, "optimizer": optimizer, "rng": RNGState(), "counter": counter, "epoch": 5}
    manager = CheckpointManager(root)
    if mode == "save":
        for step in range(2):
            torch.manual_seed(100 + step)
            model(torch.randn(4, 33)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(1000 + rank)
        manager.save(7, state)
        manager.close()
    else:
        state["epoch"] = counter.value["rank"] = -1
        assert manager.restore(state) == 7
        assert state["epoch"] == 5
        if rank < 2:
            drawn = torch.rand(1)
            torch.manual_seed(1000 + rank)
            assert torch.equal(torch.rand(1), drawn)
        assert counter.value["rank"] == (rank if rank < 2 else -1), counter.value
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(full, f"{root}/{mode}-{kind}-{world}.pt")
"""


@pytest.mark.parametrize(("saved", "loads"), [("fsdp", [("fsdp", 4), ("plain", 1)]), ("ddp", [("fsdp", 2)])])
def test_a_job_is_restored_on_other_ranks_and_under_another_wrapper(saved, loads, run_ranks, tmp_path, assert_same):
    run_ranks(2, JOB, str(tmp_path), "save", saved)
    expected = torch.load(tmp_path / f"save-{saved}-2.pt", weights_only=False)
    for kind, world in loads:
        run_ranks(world, JOB, str(tmp_path), "load", kind)
        assert_same(torch.load(tmp_path / f"load-{kind}-{world}.pt", weights_only=False), expected)


def test_ranks_skip_the_same_damaged_checkpoint_and_fail_together(run_ranks, tmp_path):
    outputs = run_ranks(
        2,
        """
        import logging, glob
        from airdata.errors import CheckpointError
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor, Shard
        mesh = init_device_mesh("cpu", (world,))
        def state(value):
            return {"x": distribute_tensor(torch.full((1000,), value), mesh, [Shard(0)])}
        manager = CheckpointManager(root)
        for step in (1, 2):
            manager.save(step, state(float(step)))
        manager.wait()
        if rank == 0:  # damages the share of rank 1 only
            [victim] = glob.glob(f"{root}/step-00000002/__1_0.*")
            with open(victim, "r+b") as file:
                file.seek(1500); file.write(b"X")
        dist.barrier()
        target = state(0.0)
        print(manager.restore(target), target["x"].to_local().unique().tolist())
        for attempt in (lambda: manager.save(3 + rank, state(1.0)),
                        lambda: manager.save(5, {"x": 1} if rank == 0 else {"o": torch.optim.SGD([torch.ones(1)])}),
                        lambda: manager.restore(target if rank else {"unknown": 1})):
            try:
                attempt(); print("no error")
            except (CheckpointError, TypeError) as error:
                print(type(error).__name__)
        manager.save(6, state(6.0)); manager.wait(); print(manager.latest())
        """,
        str(tmp_path),
    )
    first, second = (output.splitlines() for output in outputs)
    assert first[0] == second[0] == "1 [1.0]"
    assert first[1:] == ["CheckpointError", "CheckpointError", "CheckpointError", "6"]
    assert second[1:] == ["CheckpointError", "TypeError", "CheckpointError", "6"]
