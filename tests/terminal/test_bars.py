"""Bars of what takes long, on a terminal and in a notebook."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hookdiff.terminal.bars import shown_works
from hookdiff.terminal.pace import paced
from hookdiff.testing.toy import toy_loop
from hookdiff_progress import ProgressBar
from tests.conftest import PATIENCE, Clock

ERASE = "\x1b[2K"  # the code that empties a line of a terminal


class Notebook:
    """Stands in for IPython in a kernel: it keeps what is displayed, and how often an output is replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.displayed: list[Any] = []
        self.updated: list[dict[str, str]] = []

        class ZMQInteractiveShell:  # the name by which rich knows a notebook
            kernel = True

        package: Any = ModuleType("IPython")
        package.display = ModuleType("IPython.display")
        package.get_ipython = package.display.get_ipython = ZMQInteractiveShell
        package.display.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", package.display)
        monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)

    def display(self, *given: Any, **_: Any) -> "Notebook":
        self.displayed += given
        return self

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.updated.append(bundle)


def test_a_run_in_a_notebook_has_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    toy_loop({"bar": ProgressBar(), "clock": Clock(monkeypatch)}, steps=5, log_every=1).run()
    assert len(notebook.displayed) == 1
    assert len(notebook.updated) >= 5
    last = notebook.updated[-1]
    assert "step 5/5" in last["text/plain"]
    assert "loss" in last["text/html"]
    assert "<span" in last["text/html"]


def test_work_in_a_notebook_has_a_bar_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, clock = Notebook(monkeypatch), Clock(monkeypatch)
    with shown_works(), shown_works():  # the second one leaves it to the first
        for _ in paced(range(3), 3, "data: decoding", size=lambda _: 1):
            clock.before_step()
    assert len(notebook.displayed) == 1
    assert "data: decoding" in notebook.displayed[0]["text/plain"]
    assert "2/3 images" in "".join(bundle["text/plain"] for bundle in notebook.updated)
    assert notebook.updated[-1] == {"text/plain": ""}


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make stderr a terminal, and return what is written to it."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_the_bar_of_a_run_stays_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = terminal(monkeypatch), Clock(monkeypatch)
    toy_loop({"bar": ProgressBar(), "clock": clock}, steps=5).run()
    _, last, after = shown.getvalue().rpartition("step 5/5")
    assert last
    assert ERASE not in after


def test_the_bar_of_other_work_leaves_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = terminal(monkeypatch), Clock(monkeypatch)
    with shown_works():
        for _ in paced(range(3), 3, "data: decoding", size=lambda _: 1):
            clock.before_step()
    _, last, after = shown.getvalue().rpartition("data: decoding")
    assert last
    assert ERASE in after


LONG = """
import sys, time
from hookdiff.terminal.pace import paced
from hookdiff.terminal.bars import shown_works
now = 0.0
time.monotonic = lambda: now
with shown_works():
    for _ in paced(range(20), 20, "work", size=lambda _: 1):
        now += 0.1
print("done", file=sys.stderr)
"""


def test_a_closed_stdout_ends_nothing(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(LONG)
    command = f"{sys.executable} {script} >&-"
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"], env=environment, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout
    assert b"work" in done.stdout
    assert b"done" in done.stdout


def test_the_first_bar_draws_from_no_generator_of_the_run() -> None:
    code = """
import random, sys
from hookdiff.terminal import bars
bars._is_notebook = lambda: True
random.seed(0)
bars.find_display(lambda columns, blocks: [])
print("rich.style" in sys.modules, random.random() == random.Random(0).random())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "True True\n", done.stderr
