"""Importing the package, and starting its processes, loads nothing heavy.

What a process imports is most of what it takes to start, and a launch waits for three starts, one after the other:
what the caller needs before it has an agent, the agent, the ranks.
"""

import sys

import pytest

from airdist import distributed

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


SLOW = {
    "asyncio",
    "multiprocessing",
    "concurrent",
    "ssl",
    "hashlib",
    "tempfile",
    "shutil",
    "email",
    "http",
    "logging.config",
}
"""Of the standard library: each costs a process that imports it between 3 and 60 ms."""


@pytest.fixture
def imported(cpu_world):
    """The modules that the agent and a rank of a launch import in all their life, the interpreter's own with them."""

    @distributed(num_accelerators=1, tracking=False, logs="none", env={"PYTHONPROFILEIMPORTTIME": "1"})
    def function():
        return 1

    launch = function.submit()
    launch.result(60)

    def modules(log):
        return {line.split("|")[-1].strip() for line in log.splitlines() if line.startswith("import time:")}

    agent = (launch.run_dir / "logs" / "agent.log").read_text()
    return {"airdist.agent": modules(agent), "airdist.rank": modules(launch.logs(0))}


def test_the_agent_and_the_ranks_import_no_more_than_they_use(imported):
    for program, modules in imported.items():
        assert program in modules
        assert not modules & {*SLOW, *HEAVY}
    # `inspect` comes with `dataclasses` and costs 15 ms; a rank needs it anyway, for cloudpickle.
    assert not imported["airdist.agent"] & {"dataclasses", "inspect", "pickle", "cloudpickle", "logging", "site"}
    of_many_nodes = {"airdist.arrival", "airdist.follower", "airdist.link"}
    assert not imported["airdist.agent"] & of_many_nodes
    assert not imported["airdist.rank"] & {"subprocess", "airdist.devices", "airdist.launch", "airdist.tracking.run"}


def test_what_follows_a_launch_is_imported_when_its_agent_has_started(run_script):
    later = ("airdist.launch", "airdist.collect", "airdist.outcome", "airdist.leader", "ctypes")
    before = f"import sys, airdist.decorator, airdist.engines.local; print([n for n in {later} if n in sys.modules])"
    assert run_script(before).strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_agent_is_ended_where_its_launch_cannot_be_followed(run_script, cpu_world):
    said = run_script(
        """
        import os, pathlib, sys, time
        from airdist import distributed

        def alive(name):
            commands = (path / "cmdline" for path in pathlib.Path("/proc").iterdir() if path.name.isdigit())
            return any(name in read(command) for command in commands)

        def read(path):
            try:
                return path.read_text()
            except OSError:
                return ""

        sys.modules["airdist.launch"] = None  # what cannot be imported
        try:
            distributed(num_accelerators=2, tracking=False)(time.sleep).distributed(600)
        except ImportError:
            try:
                print(os.waitpid(-1, os.WNOHANG))
            except ChildProcessError:
                print("no child")
        deadline = time.monotonic() + 20
        while alive(os.environ["AIRDIST_RUN_DIR"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        print("left" if alive(os.environ["AIRDIST_RUN_DIR"]) else "nothing left")
        """
    )
    assert said.splitlines() == ["no child", "nothing left"]


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
