"""Which failure is the cause, and what is said of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airdist import RankDiedError, RankExitError
from airdist.failure import LaunchFailure, RankFailure, cause, death, explain, tail


def failure(error, at=0.0, rank=0, log=Path("nowhere"), traceback=""):
    return RankFailure(rank, error, f"{type(error).__name__}: {error}", traceback, "host", log, at)


SYMPTOMS = [
    RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    ConnectionResetError("x"),
    BrokenPipeError("x"),
]
CAUSES = [ValueError("x"), RuntimeError("CUDA out of memory"), death(1, -9), death(1, 3)]


@given(
    st.lists(st.tuples(st.sampled_from(SYMPTOMS), st.floats(0, 10)), max_size=5),
    st.lists(st.tuples(st.sampled_from(CAUSES), st.floats(0, 10)), min_size=1, max_size=5),
)
def test_the_earliest_real_failure_is_the_cause_however_early_symptoms_came(symptoms, causes):
    chosen = cause([failure(error, at) for error, at in [*symptoms, *causes]])
    assert chosen.error in CAUSES
    assert chosen.at == min(at for _, at in causes)


def test_where_there_are_only_symptoms_the_earliest_counts():
    assert cause([failure(SYMPTOMS[0], 2.0), failure(SYMPTOMS[2], 1.0)]).at == 1.0


@pytest.mark.parametrize(("code", "words"), [(-9, "SIGKILL (exit code 137)"), (-7, "/dev/shm"), (-50, "signal 50")])
def test_a_death_by_signal_is_put_in_words(code, words):
    error = death(3, code)
    assert isinstance(error, RankDiedError)
    assert (error.rank, error.signal) == (3, -code)
    assert words in str(error)


def test_an_exit_code_is_kept():
    error = death(3, 42)
    assert isinstance(error, RankExitError)
    assert (error.rank, error.exit_code) == (3, 42)


def test_the_exception_itself_carries_where_why_and_what_else(tmp_path):
    (tmp_path / "log").write_text("before\nTraceback of it\n")
    original = ValueError("x")
    chosen = failure(original, log=tmp_path / "log", traceback="Traceback of it\n", rank=1)
    other = failure(KeyError("y"), at=1.0)
    error = explain(chosen, LaunchFailure(tmp_path, (chosen, other), {2: "v"}), 4)
    assert error is original
    assert str(error.__cause__).strip() == "Traceback of it"
    (note,) = error.__notes__
    assert "rank 1 of 4 on host" in note
    assert "also failed: rank 0: KeyError: 'y'" in note
    assert note.endswith("its last output:\n    before")
    assert error.launch.results == {2: "v"}


def test_the_tail_is_the_last_lines_of_a_file_of_any_size(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {index}\n" for index in range(100_000)))
    assert tail(path)[-1] == "line 99999"
    assert len(tail(path)) == 12
    assert tail(tmp_path / "none") == []
