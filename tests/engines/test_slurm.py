"""What is Slurm's own: jobs that are submitted, wait, are taken away and come back."""

import os
import subprocess
import time

import pytest

from airdist import LaunchCancelledError, LaunchError
from airdist.engines.slurm_job import minutes


def attempt():
    number = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", number, flush=True)
    if number == "0":
        time.sleep(600)
    return number


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hurry(slurm, job_id):
    """Slurm lets a requeued job wait for two minutes; an operator need not, beyond the second it was taken away in:
    what starts in that one has "Job credential revoked"."""
    shown = ""

    def moved():
        nonlocal shown
        shown = slurm.ask("scontrol", "-o", "show", "job", job_id)
        return "Restarts=1" in shown and "JobState=PENDING" in shown

    wait_until(moved)
    slurm.ask("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")


def test_a_submitted_job_returns_values_and_has_the_shape_that_was_asked_for(slurm, slurm_queue):
    def work():
        return os.environ["SLURM_JOB_ID"], os.environ["NODE_RANK"], os.environ.get("SLURM_PROCID")

    launch = slurm_queue.launchable(
        work, engine_options={"partition": "low", "time": "0:07:00", "comment": "mine", "nice": 5}
    ).submit()
    results = launch.result(120)
    assert results == [(launch.job_id, str(rank // 2), None) for rank in range(4)]
    job = slurm.ask("scontrol", "-o", "show", "job", launch.job_id)
    assert "TimeLimit=00:07:00" in job
    assert "Comment=mine" in job
    assert "Nice=5" in job
    assert "NumNodes=2" in job


def test_a_job_that_is_taken_away_comes_back_where_restarts_allow(slurm, slurm_queue):
    launch = slurm_queue.launchable(attempt, max_restarts=1).submit()
    wait_until(lambda: "attempt 0" in launch.logs(3))
    other = subprocess.Popen(
        ["srun", "--partition=high", "--nodes=2", "--exclusive", "true"], env={**os.environ, **slurm.environ}
    )
    hurry(slurm, launch.job_id)
    assert launch.result(120) == ["1"] * 4
    assert launch.logs(3) == "attempt 1\n"
    assert other.wait(60) == 0


@pytest.mark.slow
def test_the_signal_before_the_end_of_a_job_has_it_requeued(slurm, slurm_queue):
    launch = slurm_queue.launchable(attempt, max_restarts=1).submit()
    wait_until(lambda: "attempt 0" in launch.logs(3))
    slurm.ask("scancel", "--signal=USR2", launch.job_id)
    hurry(slurm, launch.job_id)
    assert launch.result(120) == ["1"] * 4


@pytest.mark.slow
def test_a_job_that_is_cancelled_by_an_operator_is_not_waited_for(slurm, slurm_queue):
    launch = slurm_queue.launchable(attempt, max_restarts=1).submit()
    wait_until(lambda: "attempt 0" in launch.logs(3))
    slurm.ask("scancel", launch.job_id)
    with pytest.raises((LaunchCancelledError, LaunchError)):
        launch.result(60)


def test_a_cancelled_launch_takes_its_job_out_of_the_queue(slurm, slurm_queue):
    options = {"partition": "low", "begin": "now+1hour"}
    launch = slurm_queue.launchable(attempt, engine_options=options).submit()
    assert "PENDING" in slurm.ask("scontrol", "-o", "show", "job", launch.job_id)
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.result(60)
    wait_until(lambda: "JobState=CANCELLED" in slurm.ask("scontrol", "-o", "show", "job", launch.job_id))


def test_a_job_that_waits_for_too_long_is_an_error_that_says_so(slurm_queue):
    options = {"partition": "low", "begin": "now+1hour", "queue_timeout": 1}
    with pytest.raises(LaunchError, match=r"job \d+ has waited for machines for 1 s"):
        slurm_queue.launchable(attempt, engine_options=options).distributed()


def test_what_sbatch_refuses_is_said_in_its_words(slurm_queue):
    with pytest.raises(LaunchError, match="invalid partition specified: nowhere"):
        slurm_queue.launchable(attempt, engine_options={"partition": "nowhere"}).distributed()


def test_an_allocation_has_so_many_nodes_and_takes_no_options_of_sbatch(slurm_place):
    with pytest.raises(LaunchError, match=r"nodes=3, but the allocation \d+ has 2"):
        slurm_place.launchable(attempt, nodes=3).distributed()
    with pytest.raises(LaunchError, match="partition"):
        slurm_place.launchable(attempt, engine_options={"partition": "low"}).distributed()


def test_a_launch_that_ended_leaves_its_allocation_as_it_was(slurm, slurm_place):
    def work():
        return os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"]

    steps = [set(slurm_place.launchable(work).distributed()) for _ in range(2)]
    assert [step for ((_, step),) in map(tuple, steps)] == ["0", "1"]
    assert {job for ((job, _),) in map(tuple, steps)} == {os.environ["SLURM_JOB_ID"]}
    assert "JobState=RUNNING" in slurm.ask("scontrol", "-o", "show", "job", os.environ["SLURM_JOB_ID"])


@pytest.mark.parametrize(
    ("time", "expected"),
    [(90, 90), ("90", 90), ("90:00", 90), ("1:30:00", 90), ("0:00:30", 1), ("1-0", 1440), ("1-12:30", 2190)],
)
def test_times_are_read_as_slurm_writes_them(time, expected):
    assert minutes(time) == expected
    assert minutes(str(time)) == expected


def test_a_time_that_is_none_is_refused():
    with pytest.raises(ValueError, match="1:2:3:4"):
        minutes("1:2:3:4")
