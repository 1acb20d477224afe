"""Four trials of benchmarks/kill.py with shorter runs: a killed and resumed run equals an uninterrupted one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, check_facts

KILL = Path(__file__).resolve().parent.parent / "benchmarks" / "kill.py"


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and waits for a process with a timeout, as Linux does")
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one() -> None:
    # kill.py forks, so it needs a process that never had a second thread.
    command = [sys.executable, str(KILL), "--trials", "4", "--seed", "1", "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    check_facts(done.stdout.splitlines()[-1], "4 of 4", "0 checkpoints")
