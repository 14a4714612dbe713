import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdata.checkpoint.policies import Candidate, KeepBest, KeepEvery, KeepLast, Pinned, expired

steps_lists = st.lists(st.integers(0, 60), unique=True, max_size=20)


def candidates(steps, broken=(), metrics=None):
    return [
        Candidate(step, lambda step=step: None if step in broken else (metrics or {}).get(step, {})) for step in steps
    ]


@given(steps_lists, st.integers(0, 60), st.integers(1, 5), st.integers(1, 10), st.sets(st.integers(0, 60)))
def test_the_last_and_the_multiples_stay_and_nothing_else(steps, current, keep_last, keep_every, broken):
    steps = sorted({*steps, current})
    broken = broken - {current}  # it was published just now
    gone = expired(candidates(steps, broken), current, [KeepLast(keep_last), KeepEvery(keep_every)])
    stays = set(steps) - set(gone)
    assert gone == sorted(gone)
    assert all(step < current for step in gone)
    valid = [step for step in steps if step <= current and step not in broken]
    assert set(valid[-keep_last:]) <= stays
    oldest = valid[-keep_last] if len(valid) >= keep_last else -1
    assert {s for s in stays if s < oldest} == {s for s in steps if s < oldest and s % keep_every == 0}


@given(
    st.dictionaries(st.integers(0, 60), st.floats(), min_size=1, max_size=20),
    st.sampled_from(["min", "max"]),
    st.integers(1, 5),
    st.sets(st.integers(0, 60)),
)
def test_the_best_valid_steps_stay(scores, mode, count, broken):
    metrics = {step: {"loss": score} for step, score in scores.items()}
    current = max(scores)
    gone = set(expired(candidates(scores, broken, metrics), current, [KeepBest("loss", mode, count)]))
    sound = [step for step, score in scores.items() if step not in broken and not math.isnan(score)]
    best = sorted(sound, key=lambda step: (scores[step] if mode == "min" else -scores[step], -step))[:count]
    assert set(scores) - gone == {*best, current}


def test_without_a_policy_everything_stays():
    assert expired(candidates([1, 2, 3]), 3, []) == []


def test_pinned_steps_stay_and_a_generator_can_name_them():
    policies = [KeepLast(1), Pinned(step for step in (2, 99))]
    assert expired(candidates([1, 2, 3]), 3, policies) == [1]
    assert expired(candidates([1, 2, 3, 4]), 4, policies) == [1, 3]


def test_a_step_without_the_metric_is_not_among_the_best():
    metrics = {1: {"loss": 5.0}, 2: {"other": 0.0}}
    assert expired(candidates([1, 2, 3], metrics=metrics), 3, [KeepBest("loss")]) == [2]


def test_storage_is_asked_about_a_step_once_and_only_if_it_matters():
    asked = []

    def look(step):
        asked.append(step)
        return {}

    steps = [Candidate(step, lambda step=step: look(step)) for step in range(10)]
    expired(steps, 9, [KeepLast(3), KeepLast(2)])
    assert sorted(asked) == [7, 8]


@pytest.mark.parametrize(
    "make", [lambda: KeepLast(0), lambda: KeepEvery(-1), lambda: KeepBest("x", count=0), lambda: KeepBest("x", "best")]
)
def test_a_policy_that_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
