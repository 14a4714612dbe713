import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from airdata.checkpoint import CheckpointManager
from airdata.checkpoint.ranks import Ranks, as_checkpoint_error
from airdata.errors import CheckpointError, CorruptCheckpointError, StagingFullError

pytestmark = pytest.mark.filterwarnings("ignore:checkpoints under")


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


def test_a_rank_that_has_ended_is_told_in_words_of_ours(run_ranks, tmp_path):
    outputs = run_ranks(
        2,
        """
        from airdata.checkpoint.ranks import Ranks
        from airdata.errors import CheckpointError
        ranks = Ranks(timeout=60)
        dist.barrier()
        if rank == 1:
            os._exit(0)
        for attempt in (lambda: ranks.agree("saving step 3", 3, lambda: 1), lambda: ranks.decide(lambda: 1)):
            try:
                attempt()
            except CheckpointError as error:
                print(error)
        sys.stdout.flush()
        os._exit(0)
        """,
        str(tmp_path),
    )
    told = "rank 0 of 2 lost touch with the others; one of them has ended, or did not answer within 60 s. Look for"
    agreeing, deciding = outputs[0].splitlines()
    assert agreeing.startswith(f"saving step 3: {told}")
    assert deciding.startswith(f"deciding together: {told}")


def test_a_rank_that_ends_in_the_middle_of_a_load_ends_it_for_the_others(run_ranks, tmp_path):
    manager = CheckpointManager(tmp_path, async_save=False)
    manager.save(3, {"x": torch.ones(1000)})
    outputs = run_ranks(
        2,
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem
        from airdata.errors import CheckpointError
        class Ending(LocalFileSystem):
            protocol = "ending"
            def cat_file(self, path, start=None, end=None, **options):
                if rank == 1 and path.endswith(".distcp"):
                    os._exit(0)
                return super().cat_file(path, start=start, end=end, **options)
            @classmethod
            def _strip_protocol(cls, path):
                return LocalFileSystem._strip_protocol(path.removeprefix("ending://"))
        fsspec.register_implementation("ending", Ending, clobber=True)
        try:
            CheckpointManager("ending://" + root, timeout=60).restore({"x": torch.zeros(1000)})
        except CheckpointError as error:
            print(type(error).__name__, error)
        sys.stdout.flush()
        os._exit(0)
        """,
        str(tmp_path),
    )
    assert outputs[0].startswith("CheckpointError loading step 3: rank 0 of 2 lost touch with the others")
