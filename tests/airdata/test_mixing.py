"""Several paths mixed by weight: decks that are dealt over epochs, and positions that resume anywhere."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airdata import DataLoader, Manifest, UCVolumeDataset, mixing
from airdata.errors import StateError
from airdata.mixing import Mixture, shares

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*ranks get one batch less")

GOLDEN = [[3, 1, 0, 2, 3, 0, 1, 4, 7, 6], [1, 0, 3, 2, 1, 2, 3, 8, 9, 7]]
GOLDEN_HUGE = [1904640196, 53659649, 2851550697]

sources = st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 40)), min_size=1, max_size=5)


# --- shares ---


@given(sources)
def test_shares_fill_the_epoch_in_proportion_to_the_weights(given_sources) -> None:
    weights, sizes = zip(*given_sources, strict=True)
    dealt = shares(weights, sizes)
    total = sum(sizes)
    assert sum(dealt) == total
    assert min(dealt) >= 1
    exact = [Fraction(weight) / sum(map(Fraction, weights)) * total for weight in weights]
    if min(exact) >= 1:  # otherwise those that would get nothing take a sample from others
        assert all(abs(share - one) < 1 for share, one in zip(dealt, exact, strict=True))
    for (a, share_a), (b, share_b) in itertools.combinations(zip(exact, dealt, strict=True), 2):
        assert share_a <= share_b or a >= b


def test_shares_of_round_numbers_are_round() -> None:
    assert shares([0.7, 0.3], [50, 50]) == (70, 30)
    assert shares([7, 3], [90, 10]) == (70, 30)
    assert shares([1, 1, 1], [5, 4, 1]) == (4, 3, 3)
    assert shares([1e-9, 1], [10, 10]) == (1, 19)


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_weights_that_mix_nothing_are_refused(weights) -> None:
    with pytest.raises(ValueError, match="weights="):
        shares(weights, [5, 5])


# --- which files ---


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["mapped one by one", "sorted"])
@settings(max_examples=50)
@given(sources, st.integers(0, 2**63), st.integers(1, 9))
def test_no_file_comes_again_before_all_others_of_its_source_have_come(limit, given_sources, seed, epochs) -> None:
    weights, sizes = zip(*given_sources, strict=True)
    per_epoch = shares(weights, sizes)
    slots = np.arange(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    counts = np.zeros(sum(sizes), np.int64)
    for epoch in range(epochs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixing, "SORTED_UP_TO", limit)
            rows = Mixture(seed, epoch, sizes, per_epoch)[slots]
            assert Mixture(seed, epoch, sizes, per_epoch)[slots[3:8]].tolist() == rows[3:8].tolist()
        counts += np.bincount(rows, minlength=sum(sizes))
        per_source = [int(part.sum()) for part in np.split(np.bincount(rows, minlength=sum(sizes)), ends[:-1])]
        assert per_source == list(per_epoch)
        assert all(part.max() - part.min() <= 1 for part in np.split(counts, ends[:-1]))


def test_a_source_that_is_not_used_up_shows_other_files_and_any_choice_is_about_as_likely() -> None:
    first = np.arange(2)
    pairs = Counter(
        frozenset(Mixture(seed, epoch, (5, 15), (2, 18))[first].tolist()) for seed in range(1500) for epoch in (0, 1)
    )
    assert set(map(len, pairs)) == {2}
    assert len(pairs) == 10
    # Chi-square with 9 degrees of freedom: 27.9 is passed once in a thousand, and the seeds are fixed.
    assert sum((count - 300) ** 2 / 300 for count in pairs.values()) < 27.9


def test_the_files_of_a_saved_position_never_change_between_releases() -> None:
    assert [Mixture(11, epoch, (4, 6), (7, 3))[np.arange(10)].tolist() for epoch in (0, 5)] == GOLDEN
    huge = Mixture(11, 5, (3_000_000_000, 2), (10**9, 7))
    assert huge[np.array([0, 1, 10**9 - 1])].tolist() == GOLDEN_HUGE


# --- datasets ---


@pytest.fixture
def paths(make_files, tmp_path) -> list[str]:
    """A directory of 30 files, and one of 10."""
    for name, count in (("large", 30), ("small", 10)):
        make_files(tmp_path / name, count)
    return [str(tmp_path / "large"), str(tmp_path / "small")]


def tails(samples) -> list[str]:
    return [os.path.join(path.split("/")[-3], os.path.basename(path)) for path in samples]


def test_an_epoch_has_the_weighted_number_of_each_path_at_random_places(paths) -> None:
    dataset = UCVolumeDataset(paths, weights=[1, 1], shuffle=True, seed=4)
    assert len(dataset) == 40
    total: Counter[str] = Counter()
    for _ in range(3):
        epoch = tails(dataset)
        kinds = [name.split("/")[0] for name in epoch]
        assert Counter(kinds) == {"large": 20, "small": 20}
        assert 4 <= kinds[:20].count("small") <= 16
        total.update(epoch)
    assert Counter(count for name, count in total.items() if name.startswith("large")) == {2: 30}
    assert Counter(count for name, count in total.items() if name.startswith("small")) == {6: 10}


def test_weights_in_proportion_to_the_sizes_read_every_file_once(paths) -> None:
    assert sorted(UCVolumeDataset(paths, weights=[3, 1], shuffle=True)) == sorted(UCVolumeDataset(paths))


@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
def test_a_mixture_resumes_on_any_topology(paths, uneven) -> None:
    options = {"weights": [2, 3], "shuffle": True, "seed": 8}
    expected = UCVolumeDataset(paths, **options)
    epochs = [tails(expected) for _ in range(2)]
    served, state = [], None
    for world, workers, batch, steps in ((2, 0, 2, 3), (1, 2, 3, 2), (3, 0, 2, None)):
        shares, states = [], []
        for rank in range(world):
            source = UCVolumeDataset(paths, **options, rank=rank, world_size=world, uneven=uneven)
            loader = DataLoader(source, batch_size=batch, num_workers=workers)
            if state is not None:
                loader.load_state_dict(state)
            shares.append([tails(got) for got in itertools.islice(iter(loader), steps)])
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
        served += [name for step in itertools.zip_longest(*shares, fillvalue=[]) for got in step for name in got]
    rest = 40 - 12 - 6
    assert served[:36] == epochs[0][:36]
    assert len(served) == 18 + {"keep": rest, "drop": rest // 6 * 6, "pad": -(-rest // 6) * 6}[uneven]
    loader = DataLoader(UCVolumeDataset(paths, **options), batch_size=4, num_workers=0)
    loader.load_state_dict({**state, "epoch": 1, "samples_served": 0})
    assert tails(path for got in loader for path in got) == epochs[1]


def test_a_position_of_another_mixture_is_refused_and_of_the_same_in_other_units_is_not(paths) -> None:
    state = UCVolumeDataset(paths, weights=[1, 1], shuffle=True).state_dict()
    for options in ({"weights": [1, 3]}, {}):
        with pytest.raises(StateError, match=r"samples of each source was '20\+20' and is '(10\+30)?'"):
            UCVolumeDataset(paths, shuffle=True, **options).load_state_dict(state)
    UCVolumeDataset(paths, weights=[0.5, 0.5], shuffle=True).load_state_dict(state)


def test_a_path_without_files_cannot_be_mixed(paths) -> None:
    manifests = [Manifest.from_paths(["class0/file00000.bin"]), Manifest.from_paths([])]
    with pytest.raises(ValueError, match="source 1 has a weight and no files"):
        list(UCVolumeDataset(paths, weights=[1, 1], shuffle=True, manifest=manifests))
