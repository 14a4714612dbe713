"""Classes and functions of a script, found by name in ranks and in the worker processes that ranks start."""

import pytest

PREAMBLE = """
import multiprocessing, pickle, sys
from airdist import distributed
one = distributed(num_accelerators=1, tracking=False, logs="none")
print("the script runs")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_loader_workers_of_a_rank_find_the_datasets_of_the_script(run_script, method):
    # Given a script without a main guard, whose classes and functions are used by name only in a worker.
    out = run_script(
        PREAMBLE
        + f"""
import torch.utils.data
OFFSET = 10
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return offset(index * index)
def offset(value):
    return value + OFFSET
def collate(items):
    return sorted(items)
def make_loader(dataset):
    return torch.utils.data.DataLoader(
        dataset, batch_size=2, collate_fn=collate, num_workers=2, multiprocessing_context="{method}")
@one
def main(dataset):
    return list(make_loader(dataset))
if __name__ == "__main__":
    print(main.distributed(Squares())[0])
"""
    )
    # Then they are found, and the script has not been executed again.
    assert out.split("\n") == ["the script runs", "[[10, 11], [14, 19]]", ""]


def test_a_pool_of_a_rank_calls_functions_of_the_script_and_returns_its_objects(run_script):
    out = run_script(
        PREAMBLE
        + """
class Outer:
    class Inner:
        def __init__(self, x):
            self.x = x
def main(x):
    return Outer.Inner(x + 1)
@one
def train():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        back = pool.map(main, [1])[0]
    return type(back) is Outer.Inner, back.x, "multiprocessing" in str(pickle.dumps(back))
print(train.distributed()[0])
"""
    )
    assert out.split("\n")[1] == "(True, 2, False)"


def test_a_class_that_only_an_argument_knows_can_be_saved_by_name(run_script):
    out = run_script(
        PREAMBLE
        + """
class Config:
    rate = 3
@one
def saves(config):
    return pickle.loads(pickle.dumps(config)).rate, pickle.dumps(config)
rate, saved = saves.distributed(Config())[0]
print(rate, type(pickle.loads(saved)) is Config)
"""
    )
    assert out.split("\n")[1] == "3 True"


def test_workers_do_not_load_the_arguments_of_the_call(run_script):
    out = run_script(
        PREAMBLE
        + """
import os
class Tells:
    def __reduce__(self):
        return tell, ()
def tell():
    print("loaded in", "a worker" if multiprocessing.parent_process() else "the rank", flush=True)
def work(_):
    return 1
@one
def train(tells):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(work, [1])
launch = train.submit(Tells())
print(launch.result(100)[0], launch.logs().split("\\n"))
"""
    )
    assert out.split("\n")[1] == "[1] ['loaded in the rank', '']"
