"""Ten trials of benchmarks/kill.py with shorter runs: a run that is killed anywhere ends as if it never was."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import check_facts

KILL = Path(__file__).resolve().parent.parent / "benchmarks" / "kill.py"


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and waits for a process with a timeout, as Linux does")
def test_a_run_that_is_killed_ends_as_the_run_that_was_never_stopped() -> None:
    # A process of its own: it forks, and must not have had any threads.
    command = [sys.executable, str(KILL), "--trials", "10", "--seed", "1", "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_facts(done.stdout.splitlines()[-1], "10 of 10", "0 checkpoints")
