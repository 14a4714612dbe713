"""Training frameworks run unchanged inside a decorated function: they find the world that torchrun would give them.

Each trains a small model made on the spot on two CPU ranks and must end with equal weights in both. The frameworks that
are not among the development requirements are tested where they are installed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from airdist import distributed

pytestmark = pytest.mark.timeout(300)
two = distributed(num_accelerators=2, tracking=False, logs="none", timeout=240)


@pytest.fixture(autouse=True)
def _cpu_world(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def make_model():
    torch.manual_seed(int(os.environ["RANK"]))  # ranks start apart: only a framework that works makes them equal
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def make_data():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check(results):
    """Ranks agree on the weights, and each has seen its own half of the data."""
    (first, seen), (second, also_seen) = results
    assert torch.equal(first, second)
    assert seen == also_seen == 32


def test_ddp():
    @two
    def train():
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = make_data()
        sampler = torch.utils.data.DistributedSampler(data)
        seen = 0
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            seen += len(x)
        return weights(model.module), seen

    check(train.distributed())


def test_fsdp2():
    @two
    def train():
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = make_model()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        data = make_data()
        sampler = torch.utils.data.DistributedSampler(data)
        seen = 0
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            seen += len(x)
        return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()]), seen

    check(train.distributed())


@needs("accelerate")
def test_accelerate():
    @two
    def train():
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = make_model()
        loader = torch.utils.data.DataLoader(make_data(), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
        assert accelerator.num_processes == 2
        seen = 0
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            seen += len(x)
        return weights(accelerator.unwrap_model(model)), seen

    check(train.distributed())


@needs("lightning")
def test_lightning():
    @two
    def train():
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = make_model()
                self.seen = 0

            def training_step(self, batch):
                x, y = batch
                self.seen += len(x)
                return torch.nn.functional.mse_loss(self.model(x), y)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.05)

        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False
        )
        trainer.fit(module, torch.utils.data.DataLoader(make_data(), batch_size=8))
        assert trainer.world_size == 2
        return weights(module.model), module.seen

    check(train.distributed())


@needs("transformers", "accelerate")
def test_hugging_face_trainer(tmp_path):
    @two
    def train(folder):
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Regression(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = make_model()
                self.seen = 0

            def forward(self, x, labels):
                self.seen += len(x)
                prediction = self.model(x)
                return {"loss": torch.nn.functional.mse_loss(prediction, labels), "logits": prediction}

        class CountSteps(TrainerCallback):
            steps = 0

            def on_step_end(self, *args, **kwargs):
                CountSteps.steps += 1

        model = Regression()
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8, num_train_epochs=1, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, learning_rate=0.05,
        )  # fmt: skip
        data = [{"x": x, "labels": y} for x, y in make_data()]
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[CountSteps()])
        trainer.train()
        assert arguments.world_size == 2
        assert CountSteps.steps == 4
        return weights(model.model), model.seen

    check(train.distributed(str(tmp_path / "trainer")))
