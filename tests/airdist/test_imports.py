"""Importing the package, and starting its processes, loads nothing heavy."""

import pytest

HEAVY = ("torch", "mlflow", "ray", "numpy", "asyncio", "airdata")


@pytest.mark.parametrize(
    "module", ["airdist", "airdist.decorator", "airdist.launch", "airdist.agent", "airdist.rank", "airdist.runtime"]
)
def test_importing_a_module_loads_no_heavy_library(run_script, module):
    found = run_script(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])")
    assert found.strip() == "[]"


def test_the_agent_needs_the_standard_library_only(run_script):
    loaded = run_script(
        """
        import sys
        before = set(sys.modules)
        import airdist.agent
        for name in sorted({name.partition(".")[0] for name in set(sys.modules) - before}):
            if name not in sys.stdlib_module_names:
                print(name)
        """
    )
    assert loaded.split() == ["airdist"]


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error():
    import airdist

    for name in airdist.__all__:
        assert getattr(airdist, name) is not None
    assert set(airdist.__all__) <= set(dir(airdist))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = airdist.nonsense


def test_errors_survive_pickling_with_their_facts():
    import pickle

    from airdist import errors

    for error in [
        errors.RankDiedError("x", rank=1, signal=9),
        errors.RankExitError("x", rank=1, exit_code=3),
        errors.RankError("x", rank=2, type_name="a.B"),
        errors.DistributedTimeoutError("x", stacks={0: "here"}),
        errors.PayloadError("x"),
    ]:
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert (str(back), vars(back)) == (str(error), vars(error))
        assert isinstance(back, errors.AirdistError)
