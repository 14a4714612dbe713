import pytest
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from airdata.checkpoint.ranks import Ranks, as_checkpoint_error
from airdata.errors import CheckpointError, CorruptCheckpointError, StagingFullError


def dcp_error(**causes):
    return CheckpointException("write", {int(rank[1:]): _wrap_exception(cause) for rank, cause in causes.items()})


def test_the_typed_cause_is_the_one_that_is_raised():
    error = as_checkpoint_error(dcp_error(r0=RuntimeError("peer"), r3=StagingFullError(28, "no room")), "saving")
    assert isinstance(error, StagingFullError)
    assert "failed on rank 3" in str(error)
    assert "1 other ranks failed too" in str(error)


def test_any_other_cause_becomes_a_checkpoint_error_with_its_type():
    error = as_checkpoint_error(dcp_error(r1=ValueError("size mismatch")), "loading step 4")
    assert type(error) is CheckpointError
    assert str(error) == "loading step 4 failed on rank 1: ValueError: size mismatch"


def test_it_is_corrupt_only_if_no_rank_has_another_reason():
    corrupt = CorruptCheckpointError("x")
    assert isinstance(as_checkpoint_error(dcp_error(r0=corrupt, r1=corrupt), "l"), CorruptCheckpointError)
    assert type(as_checkpoint_error(dcp_error(r0=corrupt, r1=OSError("y")), "l")) is CheckpointError


def test_alone_a_rank_decides_and_agrees_with_itself():
    ranks = Ranks(timeout=1)
    assert (ranks.rank, ranks.world_size, ranks.alone, ranks.is_coordinator) == (0, 1, True, True)
    assert ranks.decide(lambda: 3) == 3
    assert ranks.agree("x", 1, lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        ranks.decide(lambda: 1 // 0)


def test_together_they_follow_the_first_and_share_their_errors(run_ranks, tmp_path):
    outputs = run_ranks(
        2,
        """
        from airdata.checkpoint.ranks import Ranks
        from airdata.errors import CheckpointError
        ranks = Ranks(timeout=60)
        print(ranks.decide(lambda: f"chosen by {rank}"))
        for attempt in (lambda: ranks.decide(lambda: 1 // (1 if rank else 0)),
                        lambda: ranks.agree("saving", "same", lambda: 1 // rank),
                        lambda: ranks.agree("saving", f"step {rank}", lambda: 1)):
            try:
                attempt()
            except (ZeroDivisionError, CheckpointError) as error:
                print(type(error).__name__, error)
        print(ranks.agree("saving", "same", lambda: rank))
        """,
        str(tmp_path),
    )
    division = "ZeroDivisionError integer division or modulo by zero"
    assert outputs[0].splitlines() == [
        "chosen by 0",
        division,
        division,
        "CheckpointError saving: rank 0 is at step 0 and rank 1 at step 1",
        "0",
    ]
    assert outputs[1].splitlines() == [
        "chosen by 0",
        division,
        "CheckpointError saving failed on rank 0: ZeroDivisionError: integer division or modulo by zero",
        "CheckpointError saving: rank 1 is at step 1 and rank 0 at step 0",
        "1",
    ]
