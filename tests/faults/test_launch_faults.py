"""A launch when things go wrong: what the caller gets, how soon, and that nothing is left behind.

Every scenario is a script in a process of its own, as a user would run it, so that it can be killed whole. The ranks (and
their children) tell who they are by appending their pid to a file.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import mlflow
import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the clean-up of orphans relies on Linux")

PROMPT = 5.0  # what the design allows for the clean-up
SLACK = 10.0  # what a busy machine may add before we call it a failure

PREAMBLE = """
import os, sys, time, subprocess, signal, threading
from airdist import distributed

PIDS = os.environ["PIDS"]

def here(pid=None):
    with open(PIDS, "a") as file:
        file.write(f"{pid or os.getpid()}\\n")

def block_in_c():
    import ctypes
    empty, _ = os.pipe()
    ctypes.CDLL(None).read(empty, ctypes.create_string_buffer(1), 1)
"""


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.end()


class World:
    """Runs a scenario and knows the processes that it brought forth."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pids = path / "pids"
        self.pids.touch()
        self.started: list[subprocess.Popen] = []

    def start(self, body: str, **env: str) -> subprocess.Popen:
        script = self.path / f"script{len(self.started)}.py"
        script.write_text(PREAMBLE + textwrap.dedent(body))
        clean = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **clean,
                "PIDS": str(self.pids),
                "AIRDIST_RUN_DIR": str(self.path / "runs"),
                "CUDA_VISIBLE_DEVICES": "",
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, body: str, timeout: float = 120, **env: str) -> tuple[str, str]:
        process = self.start(body, **env)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"{out}\n{err}"
        return out, err

    def processes(self, count: int) -> list[psutil.Process]:
        """The processes of the scenario, once `count` have reported."""
        until(lambda: len(self.pids.read_text().split()) >= count, 60, f"{count} processes report")
        found = []
        for pid in self.pids.read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        assert len(found) == count
        return found

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
        for pid in self.pids.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self.started:
            process.wait()
            process.stdout.close()
            process.stderr.close()


def until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def alive(processes):
    def lives(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]


def agent_of(rank: psutil.Process) -> psutil.Process:
    return rank.parent()


RANKS_WITH_CHILDREN = """
@distributed(num_accelerators=2, tracking=False)
def forever():
    child = subprocess.Popen(["sleep", "600"], start_new_session={new_session})
    here(child.pid)
    here()
    {block}
"""


@pytest.mark.parametrize("block", ["time.sleep(600)", "block_in_c()"])
@pytest.mark.parametrize("launch", ["forever.distributed()", "threading.Thread(target=forever.distributed).start()"])
def test_killing_the_caller_ends_ranks_and_their_children(world, block, launch):
    # The deaf rank ignores SIGTERM too, so that only the last resort can end it.
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + block
    caller = world.start(RANKS_WITH_CHILDREN.format(new_session=True, block=deaf) + launch)
    family = world.processes(4)
    agent = agent_of(next(p for p in family if p.ppid() not in {q.pid for q in family}))
    os.kill(caller.pid, signal.SIGKILL)
    until(lambda: not alive([*family, agent]), PROMPT + SLACK, "all processes of the launch have ended")


def test_the_mlflow_run_of_a_killed_caller_is_ended_as_killed(world, tmp_path):
    uri = f"sqlite:///{tmp_path}/runs.db"
    caller = world.start(
        """
        @distributed(num_accelerators=1)
        def forever():
            here()
            time.sleep(600)
        forever.distributed()
        """,
        MLFLOW_TRACKING_URI=uri,
    )
    world.processes(1)
    os.kill(caller.pid, signal.SIGKILL)

    def status() -> list[str]:
        return [run.info.status for run in mlflow.MlflowClient(uri).search_runs(["0"])]

    assert len(status()) == 1
    until(lambda: status() == ["KILLED"], 60, "the run says KILLED")


def test_a_forked_child_of_the_caller_does_not_keep_the_launch_alive(world):
    # Given a caller whose forked child holds copies of all its sockets.
    caller = world.start(
        """
        @distributed(num_accelerators=1, tracking=False)
        def forever():
            here()
            time.sleep(600)
        handle = forever.submit()
        if os.fork() == 0:
            here()
            time.sleep(600)
        handle.result()
        """
    )
    family = world.processes(2)
    rank = next(p for p in family if p.ppid() != caller.pid)
    os.kill(caller.pid, signal.SIGKILL)
    until(lambda: not alive([rank]), PROMPT + SLACK, "the rank has ended")


def test_killing_the_agent_ends_ranks_and_children_and_is_an_error_that_says_so(world):
    caller = world.start(
        RANKS_WITH_CHILDREN.format(new_session=False, block="block_in_c()")
        + """
from airdist import AgentDiedError
try:
    forever.distributed()
except AgentDiedError as error:
    print("SAID", error)
"""
    )
    family = world.processes(4)
    agent = next(agent_of(p) for p in family if agent_of(p).pid not in {q.pid for q in family})
    agent.kill()
    until(lambda: not alive(family), PROMPT + SLACK, "all processes of the launch have ended")
    out, err = caller.communicate(timeout=60)
    assert "SAID the agent of forever died" in out, err


@pytest.mark.parametrize("end", ["return", "raise KeyError('x')"])
def test_what_a_rank_leaves_running_is_ended_with_the_launch_even_a_daemon(world, end):
    # Given a grandchild that has moved to a session of its own and whose parent has ended: a daemon.
    world.run(
        f"""
        @distributed(num_accelerators=1, tracking=False, logs="none")
        def leaves_a_daemon():
            read, write = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setpgid(0, 0)
                    here()
                    os.write(write, b"x")
                    time.sleep(600)
                os._exit(0)
            os.read(read, 1)
            {end}
        try:
            leaves_a_daemon.distributed()
        except KeyError:
            pass
        """
    )
    pid = int(world.pids.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_other_children_of_the_caller_are_left_alone(world):
    out, _ = world.run(
        """
        other = subprocess.Popen(["sleep", "600"])
        @distributed(num_accelerators=2, tracking=False)
        def fails():
            raise ValueError("x")
        try:
            fails.distributed()
        except ValueError:
            pass
        print("STILL", other.poll())
        other.kill()
        """
    )
    assert "STILL None" in out


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_ends_the_ranks_and_is_raised_again(world, interrupts):
    # Given ranks that ignore SIGTERM; one interrupt waits out their grace, a second one does not.
    grace = 1 if interrupts == 1 else 300
    caller = world.start(
        f"""
        @distributed(num_accelerators=2, tracking=False, grace_seconds={grace})
        def deaf():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            here()
            block_in_c()
        try:
            deaf.distributed()
        except KeyboardInterrupt:
            print("INTERRUPTED", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """
    )
    family = world.processes(2)
    for _ in range(interrupts):
        os.kill(caller.pid, signal.SIGINT)
        time.sleep(0.3)  # not a wait for something: two key presses of a person
    out, err = caller.communicate(timeout=30)
    assert "INTERRUPTED True" in out, err
    assert not alive(family)


def test_the_end_of_the_caller_ends_a_launch_that_nobody_waits_for(world):
    caller = world.start(
        """
        @distributed(num_accelerators=1, tracking=False)
        def forever():
            here()
            time.sleep(600)
        forever.submit()
        while not open(PIDS).read():
            time.sleep(0.01)
        """
    )
    caller.communicate(timeout=60)
    assert caller.returncode == 0
    pid = int(world.pids.read_text())
    assert not psutil.pid_exists(pid) or not alive([psutil.Process(pid)])


def test_a_rank_that_raises_ends_its_peer_in_a_collective(world):
    out, _ = world.run(
        """
        class Mine(Exception):
            def __init__(self, code, *, detail):
                super().__init__(f"code {code}: {detail}")
                self.code = code
        @distributed(num_accelerators=2, tracking=False)
        def half():
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 1:
                print("AT", time.monotonic(), file=sys.stderr)
                raise Mine(7, detail="why")
            dist.all_reduce(torch.ones(1))
        try:
            half.distributed()
        except Mine as error:
            raised = time.monotonic()
            at = float(next(line for line in error.__notes__[0].splitlines() if "AT " in line).split()[-1])
            print("SECONDS", raised - at, "CODE", error.code, "MESSAGE", error)
        """
    )
    words = next(line for line in out.splitlines() if line.startswith("SECONDS")).split()
    assert float(words[1]) < 3 + SLACK  # the grace of two seconds, which a rank that hears SIGTERM does not use up
    assert " ".join(words[2:]) == "CODE 7 MESSAGE code 7: why"


def test_a_killed_rank_is_the_cause_and_its_peers_connection_errors_are_not(world):
    out, _ = world.run(
        """
        from airdist import RankDiedError
        @distributed(num_accelerators=2, tracking=False)
        def half():
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
        try:
            half.distributed()
        except RankDiedError as error:
            print("RANK", error.rank, "SIGNAL", error.signal, error)
        """
    )
    assert "RANK 1 SIGNAL 9" in out
    assert "exit code 137" in out
    assert "out-of-memory" in out


def test_four_launches_at_once_succeed_while_the_usual_port_is_taken(world):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # then somebody else has it, which serves as well
            taken.bind(("0.0.0.0", 29500))
            taken.listen()
        out, _ = world.run(
            """
            @distributed(num_accelerators=2, tracking=False, logs="none")
            def together(n):
                import torch, torch.distributed as dist
                dist.init_process_group("gloo")
                x = torch.full((1,), float(n)); dist.all_reduce(x)
                return x.item()
            handles = [together.submit(n) for n in range(4)]
            print([list(handle.result(100)) for handle in handles])
            """
        )
    assert out.strip() == "[[0.0, 0.0], [2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]"


def test_a_launch_that_runs_out_of_time_tells_where_every_rank_was(world):
    out, _ = world.run(
        """
        from airdist import DistributedTimeoutError
        def stuck_here():
            block_in_c()
        @distributed(num_accelerators=2, tracking=False, timeout=3, grace_seconds=1)
        def slow():
            if os.environ["RANK"] == "1":
                return "done"
            print("last words")
            stuck_here()
        started = time.monotonic()
        try:
            slow.distributed()
        except TimeoutError as error:
            assert isinstance(error, DistributedTimeoutError)
            print("SECONDS", time.monotonic() - started)
            print("RANKS", sorted(error.stacks), "STUCK", "in stuck_here" in error.stacks[0], error.launch.results)
            print("SAID", "block_in_c" in str(error), "last words" in str(error), "3 s" in str(error))
        """
    )
    assert "RANKS [0] STUCK True {1: 'done'}" in out
    assert "SAID True True True" in out
    assert 3 <= float(out.split("SECONDS ")[1].split()[0]) < 3 + 3 + SLACK


def test_the_deadline_holds_while_the_caller_is_suspended(world):
    caller = world.start(
        """
        @distributed(num_accelerators=1, tracking=False, timeout=2, grace_seconds=0)
        def forever():
            here()
            here(os.getppid())
            time.sleep(600)
        try:
            forever.distributed()
        except TimeoutError:
            print("TIMEOUT")
        """
    )
    rank_and_agent = world.processes(2)
    os.kill(caller.pid, signal.SIGSTOP)
    try:
        until(lambda: not alive(rank_and_agent), 2 + PROMPT + SLACK, "they have ended although the caller is suspended")
    finally:
        os.kill(caller.pid, signal.SIGCONT)
    assert "TIMEOUT" in caller.communicate(timeout=30)[0]


def test_a_caller_that_does_not_read_output_holds_no_rank_up_and_the_file_is_complete(world):
    # Given 40 MB of output, far more than pipes and buffers hold, and a caller that is suspended meanwhile.
    caller = world.start(
        """
        @distributed(num_accelerators=1, tracking=False)
        def chatty():
            here()
            line = "x" * 99
            for _ in range(400):
                print("\\n".join([line] * 1000))
            here(os.getppid())
        chatty.distributed()
        """
    )
    world.processes(1)
    os.kill(caller.pid, signal.SIGSTOP)
    try:
        until(lambda: len(world.pids.read_text().split()) == 2, 60, "the rank has written everything")
    finally:
        os.kill(caller.pid, signal.SIGCONT)
    _, err = caller.communicate(timeout=60)
    assert caller.returncode == 0, err
    (log,) = (world.path / "runs").glob("*/logs/rank-0.log")
    assert log.stat().st_size == 400 * 1000 * 100


def test_restarts_run_on_a_new_store_and_the_last_attempt_counts(world):
    out, _ = world.run(
        """
        @distributed(num_accelerators=2, tracking=False, max_restarts=2)
        def flaky():
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.ones(1); dist.all_reduce(x)
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if attempt < 1 and dist.get_rank() == 1:
                os._exit(3)
            return attempt, x.item()
        print(list(flaky.distributed()))
        """
    )
    assert "[(1, 2.0), (1, 2.0)]" in out
    assert "left with exit code 3" in out
    assert len(list((world.path / "runs").glob("*/logs/rank-1*.log"))) == 2


def test_many_short_launches_never_fail_with_an_open_process_group(world):
    # torchrun lost 3 of 20 such jobs on a busy machine to an abort at interpreter exit.
    out, _ = world.run(
        """
        @distributed(num_accelerators=2, tracking=False, logs="none")
        def job():
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.ones(1); dist.all_reduce(x)
            return x.item()
        print(sum(sum(job.distributed()) for _ in range(5)))
        """
    )
    assert out.strip() == "20.0"


def test_ranks_are_new_interpreters_however_spoilt_the_caller_is(world):
    # Given a caller as CUDA leaves a forked one: ranks that were forked from it could not use CUDA either.
    out, _ = world.run(
        """
        import torch
        torch.cuda._is_in_bad_fork = lambda: True
        held = threading.Lock(); held.acquire(); sys.modules["held"] = held
        @distributed(num_accelerators=2, tracking=False, logs="none")
        def look():
            import torch
            return torch.cuda._is_in_bad_fork(), "held" in sys.modules
        print(list(look.distributed()))
        """
    )
    assert out.strip() == "[(False, False), (False, False)]"


def test_a_rank_whose_agent_died_before_it_could_ask_to_die_with_it_ends_itself():
    done = subprocess.run(
        [sys.executable, "-c", "from airdist.processes import die_with; die_with(1 << 22); print('lives')"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")


def test_peers_of_a_failed_rank_have_their_grace_to_clean_up(world):
    out, _ = world.run(
        """
        @distributed(num_accelerators=2, tracking=False, grace_seconds=60)
        def half(folder):
            cleaning = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: cleaning.set())
            if os.environ["RANK"] == "1":
                while not os.path.exists(folder + "/waits"):
                    time.sleep(0.01)
                raise KeyError("x")
            open(folder + "/waits", "w").close()
            cleaning.wait()
            time.sleep(3)  # longer than the two seconds that are usual after a failure
            open(folder + "/clean", "w").close()
        started = time.monotonic()
        try:
            half.distributed(os.path.dirname(PIDS))
        except KeyError:
            print("CLEAN", os.path.exists(os.path.dirname(PIDS) + "/clean"), time.monotonic() - started < 50)
        """
    )
    assert "CLEAN True True" in out


def test_a_rank_that_raises_ends_a_peer_that_waits_for_it_in_the_store(world):
    out, _ = world.run(
        """
        @distributed(num_accelerators=2, tracking=False)
        def half(folder):
            import torch.distributed as dist
            if os.environ["RANK"] == "1":
                while not os.path.exists(folder + "/waits"):
                    time.sleep(0.01)
                raise KeyError("never joined")
            open(folder + "/waits", "w").close()
            dist.init_process_group("gloo")
        try:
            half.distributed(os.path.dirname(PIDS))
        except KeyError as error:
            print("RAISED", error)
        """
    )
    assert "RAISED 'never joined'" in out


def test_the_run_directory_says_that_the_caller_went_away(world):
    caller = world.start(
        """
        @distributed(num_accelerators=1, tracking=False)
        def forever():
            here()
            time.sleep(600)
        forever.distributed()
        """
    )
    world.processes(1)
    os.kill(caller.pid, signal.SIGKILL)
    (logs,) = (world.path / "runs").glob("*/logs")
    until(lambda: "the caller is gone" in (logs / "agent.log").read_text(), PROMPT + SLACK, "the agent says so")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_launches_on_a_busy_machine_all_succeed(world):
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        out, _ = world.run(
            """
            @distributed(num_accelerators=2, tracking=False, logs="none")
            def job():
                import torch, torch.distributed as dist
                dist.init_process_group("gloo")
                x = torch.ones(1); dist.all_reduce(x)
                return x.item()
            print([sum(job.distributed()) for _ in range(50)].count(4.0))
            """,
            timeout=1700,
        )
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert out.strip() == "50"


STUCK = {
    "python": "time.sleep(600)",
    "c": "signal.signal(signal.SIGTERM, signal.SIG_IGN); block_in_c()",
    "collective": """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))""",
}


def everyone(world):
    """All living processes of a scenario: they have its environment, whoever their parents are."""
    mark = f"PIDS={world.pids}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return alive(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["caller", "agent", "rank"])
@pytest.mark.parametrize("stuck", STUCK)
def test_a_kill_at_any_moment_leaves_no_process_and_always_an_outcome(world, victim, stuck):
    moments = random.Random(f"{victim} {stuck}")
    depth = {"caller": 0, "agent": 1, "rank": 2}[victim]
    for _ in range(12):
        caller = world.start(
            f"""
@distributed(num_accelerators=2, tracking=False, logs="none")
def forever():
    subprocess.Popen(["sleep", "600"])
    {STUCK[stuck]}
try:
    forever.distributed()
except Exception as error:
    print("OUTCOME", type(error).__name__)
"""
        )
        time.sleep(moments.uniform(0, 4 if stuck == "collective" else 1))  # the moment is what this is about
        line: list[psutil.Process] = []
        until(lambda line=line, caller=caller: len(_descend(line, caller.pid)) > depth, 60, f"there is a {victim}")
        os.kill(line[depth].pid, signal.SIGKILL)
        until(lambda: not everyone(world), PROMPT + SLACK, f"no process is left after a kill of the {victim}")
        out, err = caller.communicate(timeout=60)
        assert victim == "caller" or "OUTCOME " in out, err


def _descend(line: list[psutil.Process], pid: int) -> list[psutil.Process]:
    """The first child of the first child ... of a process, put into `line`."""
    line[:] = [psutil.Process(pid)]
    with contextlib.suppress(psutil.Error):
        while children := line[-1].children():
            line.append(children[0])
    return line
