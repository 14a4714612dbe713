import random

import numpy as np
import pytest
import torch
from torch import nn

from airdata.checkpoint import CheckpointManager, PerRank, RNGState

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:checkpoints under"),
]


def round_trip(tmp_path, saved, target):
    CheckpointManager(tmp_path, async_save=False).save(1, saved)
    CheckpointManager(tmp_path).restore(target)
    return target


VALUES = {
    "int": 3,
    "float": 0.1,
    "text": "däta",
    "none": None,
    "tuple": (1, "a"),
    "empty": {},
    "odd keys": {1: "a", (2, 3): None, "a.b": {}},
    "array": np.arange(3),
    "small tensor in a dict": {"t": torch.arange(3)},
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_plain_value_comes_back_as_it_was(kind, tmp_path):
    loaded = round_trip(tmp_path, {"value": VALUES[kind]}, {"value": "something else"})["value"]
    assert type(loaded) is type(VALUES[kind])
    assert str(loaded) == str(VALUES[kind])


def test_a_dict_or_a_list_stays_the_object_that_others_hold(tmp_path):
    config, events = {"old": 1}, [9, 9]
    round_trip(tmp_path, {"config": {"lr": 0.1}, "events": [1]}, {"config": config, "events": events})
    assert (config, events) == ({"lr": 0.1}, [1])


def test_large_tensors_inside_a_state_are_stored_as_tensors(tmp_path):
    class Average:
        def __init__(self, value):
            self.shadow = {"weight": torch.full((600, 600), value), "small": torch.tensor(value)}

        def state_dict(self):
            return {"shadow": self.shadow, "decay": 0.9}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    target = Average(0.0)
    round_trip(tmp_path, {"average": Average(2.0)}, {"average": target})
    assert bool((target.loaded["shadow"]["weight"] == 2).all())
    assert (target.loaded["shadow"]["small"], target.loaded["decay"]) == (2, 0.9)
    assert target.loaded["shadow"]["weight"].data_ptr() == target.shadow["weight"].data_ptr()


def test_random_numbers_go_on_where_they_were(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]  # noqa: NPY002

    CheckpointManager(tmp_path, async_save=False).save(1, {"rng": RNGState()})
    expected = draw()
    assert draw() != expected
    CheckpointManager(tmp_path).restore({"rng": RNGState()})
    assert draw() == expected


def test_a_value_kept_per_rank_may_be_an_object_with_a_state(tmp_path):
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step()
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    target = {"scheduler": PerRank(other), "number": PerRank(0)}
    round_trip(tmp_path, {"scheduler": PerRank(scheduler), "number": PerRank(7)}, target)
    assert other.last_epoch == 3
    assert target["number"].value == 7


def test_two_optimizers_and_one_over_two_modules(tmp_path, assert_same):
    def make():
        torch.manual_seed(0)
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        return {
            "a": a,
            "b": b,
            "of a": torch.optim.Adam(a.parameters()),
            "of both": torch.optim.AdamW([*a.parameters(), *b.parameters()]),
        }

    saved = make()
    saved["b"](saved["a"](torch.ones(1, 3))).sum().backward()
    saved["of a"].step()
    saved["of both"].step()
    loaded = round_trip(tmp_path, saved, make())
    for name in saved:
        assert_same(loaded[name].state_dict(), saved[name].state_dict(), name)


def test_tied_weights_and_buffers_come_back(tmp_path, assert_same):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("count", torch.tensor(3))

    saved, other = Tied(), Tied()
    round_trip(tmp_path, {"model": saved}, {"model": other})
    assert_same(other.state_dict(), saved.state_dict())
    assert other.head.weight is other.embedding.weight
