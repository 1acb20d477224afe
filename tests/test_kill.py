"""Two trials of benchmarks/kill.py with shorter runs: a killed and resumed run equals an uninterrupted one."""

import sys
from pathlib import Path

import pytest

from tests.conftest import check_facts
from tests.forked import python

KILL = Path(__file__).resolve().parent.parent / "benchmarks" / "kill.py"


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and waits for a process with a timeout, as Linux does")
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one() -> None:
    # kill.py forks, so it needs a process that never had a second thread.
    code = f"import runpy, sys; sys.path.insert(0, {str(KILL.parent)!r}); runpy.run_module('kill', run_name='__main__')"
    returned, out, err = python(code, "--trials", 2, "--seed", 1, "--steps", 20)
    assert returned == 0, out + err
    check_facts(out.splitlines()[-1], "2 of 2", "0 checkpoints")
