"""What a tether holds: a program that ends with whoever asked for it, and is asked before it is ended."""

import signal
import subprocess
import sys

import pytest

from airdist.engines.tether import tethered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's signal at a parent's death")

ASKED = """
import signal, sys, time
def asked(*_):
    print("asked", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, asked)
print("up", flush=True)
time.sleep(600)
"""


def start(program: str, seconds: float = 60) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tethered([sys.executable, "-c", program], seconds=seconds),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_exit_code_of_the_program_is_that_of_the_tether():
    with start("raise SystemExit(3)") as tether:
        assert tether.wait(60) == 3


def test_a_signal_that_ended_the_program_shows_in_the_exit_code():
    with start("import os; os.kill(os.getpid(), 9)") as tether:
        assert tether.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("end", ["pipe", "SIGTERM"])
def test_the_program_is_asked_to_end_when_nobody_holds_the_tether(end):
    with start(ASKED) as tether:
        assert tether.stdout.readline() == "up\n"
        if end == "pipe":
            tether.stdin.close()
        else:
            tether.terminate()
        assert tether.stdout.readline() == "asked\n"
        assert tether.wait(60) == 7


def test_the_program_is_asked_to_end_when_the_tether_is_killed():
    with start(ASKED) as tether:
        assert tether.stdout.readline() == "up\n"
        tether.kill()
        assert tether.stdout.read() == "asked\n"  # up to its end


def test_a_program_that_does_not_end_is_ended():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with start(deaf, seconds=0.1) as tether:
        assert tether.stdout.readline() == "up\n"
        tether.stdin.close()
        assert tether.wait(60) == 128 + signal.SIGKILL
