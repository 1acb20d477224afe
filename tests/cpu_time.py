"""Shows what the tests cost: CPU seconds by file and by test, with all processes that the tests start.

`python tests/cpu_time.py [--rows N] [OPTIONS OF PYTEST]` runs the tests of `make test` and `make test-wide`, or those
that the options of pytest choose, and prints two tables with N rows (default: 30). The CPU time of a process depends
little on what else the machine does. A fixture counts for the test that needs it first.

The columns are all seconds; those of the process of the test; number and seconds of the forks of tests/forked.py;
number and seconds of other new processes, most of which import torch. The children of a process that is killed do not
count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = "HOOKDIFF_CPU_TIME"  # names the environment variable with the folder for the costs


class Cost(NamedTuple):
    """What tests cost; all times are CPU seconds, user and system."""

    own: float = 0.0
    num_forks: float = 0
    forks: float = 0.0
    num_new: float = 0
    new: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of all processes."""
        return self.own + self.forks + self.new

    def plus(self, other: Cost, factor: int = 1) -> Cost:
        """Return the sum of this cost and `factor` times the other."""
        return Cost(*(a + factor * b for a, b in zip(self, other, strict=True)))

    def line(self, name: str) -> str:
        """Return the line of a table."""
        forks, new = f"{self.num_forks:5} {self.forks:7.1f}", f"{self.num_new:5} {self.new:7.1f}"
        return f"{self.seconds:8.1f} {self.own:8.1f} {forks} {new}  {name}"


_num_new = 0


def _count(event: str, _: object) -> None:
    global _num_new
    _num_new += event in ("subprocess.Popen", "os.posix_spawn")


def _cost() -> Cost:
    from tests.forked import forks  # which only the processes of pytest can import

    times = os.times()
    return Cost(
        times.user + times.system, forks.num, forks.seconds, _num_new, times.children_user + times.children_system
    )


def pytest_configure() -> None:
    """Count the processes that are started."""
    sys.addaudithook(_count)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the cost of a test and its fixtures."""
    before = _cost()
    result = yield
    with Path(os.environ[_FOLDER], str(os.getpid())).open("a", encoding="utf-8") as file:
        print(json.dumps([item.nodeid, _cost().plus(before, -1)]), file=file)
    return result


def table(costs: Mapping[str, Cost], rows: int) -> str:
    """Return a table of those that cost most."""
    most = sorted(costs, key=lambda name: costs[name].seconds, reverse=True)[:rows]
    titles = f"{'all s':>8} {'own s':>8} {'forks':>5} {'s':>7} {'new':>5} {'s':>7}"
    return "\n".join([titles, *(costs[name].line(name) for name in most), ""])


def main() -> int:
    """Run the tests and print the tables; return the exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=30)
    chosen, options = parser.parse_known_args()
    usual = ["-n", "auto", "--dist", "loadscope", "-m", "not slow"]
    tests: dict[str, Cost] = {}
    files: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "tests.cpu_time", *usual, *options]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, _FOLDER: folder}, check=False).returncode
        for path in Path(folder).iterdir():
            for line in path.read_text("utf-8").splitlines():
                name, cost = json.loads(line)
                file = name.partition("::")[0]
                tests[name] = Cost(*cost)
                files[file] = files.get(file, Cost()).plus(tests[name])
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = functools.reduce(Cost.plus, files.values(), Cost())
    rest = waited.ru_utime + waited.ru_stime + whole.forks - whole.seconds
    print(table(files, chosen.rows), table(tests, chosen.rows), sep="\n")
    print(whole.line(f"{len(tests)} tests of {len(files)} files"))
    print(f"{rest:8.1f} of starting pytest, of collecting, and of the processes that fork")
    print(f"{whole.seconds + rest:8.1f} CPU seconds")
    return code


if __name__ == "__main__":
    sys.exit(main())
