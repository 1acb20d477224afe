"""Output that nobody reads any more: the run saves, and has its documented exit code. Real processes and pipes."""

import json
import os
import signal
import subprocess
import sys
from itertools import cycle

import pytest

from tests.conftest import PATIENCE, check_facts, finish, output, records, wait_until

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
HOOKDIFF = [sys.executable, "-c", "from hookdiff.cli import main; main()"]


@pytest.fixture
def begin(folder):
    """Return a function that starts `hookdiff`, after a word for the shell such as `2>&-`, in its own group."""
    started = []

    def call(words, redirect="", **streams):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *sys.path)))}
        command = ["bash", "-c", f'exec "$@" {redirect}', "bash", *HOOKDIFF, *words.split()]
        process = subprocess.Popen(command, cwd=folder, env=environment, process_group=0, **streams)
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()


def outcome(run):
    return json.loads((run / "outcome.json").read_text())


def saved_steps(run):
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


RUN = "run small.toml --out run --set run.log_every=1 --plugins progress"
REDIRECTS = ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full", ">/dev/full 2>&1"]


ENDS = [("", 0, "done"), (",hd_cli_user:NaN", 3, "on_nan")]
CASES = [(redirect, *end) for redirect in REDIRECTS for end in ENDS]
MARKS = {("2>/dev/full", *ENDS[0]): [], ("<&- >&- 2>&-", *ENDS[1]): pytest.mark.wide}


@pytest.mark.parametrize(
    ("redirect", "more", "code", "reason"),
    [pytest.param(*case, marks=MARKS.get(case, pytest.mark.slow)) for case in CASES],
)
def test_a_closed_or_full_stream_does_not_end_a_run(folder, begin, redirect, more, code, reason):
    assert begin(RUN + more, redirect, **QUIET).wait(PATIENCE) == code
    assert outcome(folder / "run")["reason"] == reason
    assert saved_steps(folder / "run") == [outcome(folder / "run")["step"]]
    steps = [record["step"] for record in records(folder / "run")]  # no other text has got into the file
    assert steps == list(range(1, outcome(folder / "run")["step"] + 1))
    assert len((folder / "run" / ".lock").read_text()) == 0


@pytest.mark.wide
@pytest.mark.parametrize("lines", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_reader_that_leaves_does_not_end_a_run(folder, begin, lines):
    process = begin(RUN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
    for _ in range(lines):
        assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
    assert outcome(folder / "run")["reason"] == "done"
    assert saved_steps(folder / "run") == [6]


@pytest.mark.wide
@pytest.mark.parametrize("with_errors", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ctrl_c_on_a_run_piped_into_tee_saves_it(folder, begin, with_errors):
    words = RUN.replace("run.log_every=1", "run.steps=1000000 --set run.log_every=1")
    process = begin(words, "2>&1" if with_errors else "2>errors", stdout=subprocess.PIPE)
    pipes = {"stdin": process.stdout, "stdout": subprocess.DEVNULL}
    tee = subprocess.Popen(["tee", folder / "log"], process_group=process.pid, **pipes)
    process.stdout.close()
    seen = folder / ("log" if with_errors else "errors")
    wait_until(lambda: process.poll() is not None or b"step 1/" in (seen.read_bytes() if seen.exists() else b""))
    os.killpg(process.pid, signal.SIGINT)
    assert (process.wait(PATIENCE), tee.wait(PATIENCE)) == (130, -signal.SIGINT)
    assert outcome(folder / "run")["reason"] == "signal"
    (step,) = saved_steps(folder / "run")
    assert step == records(folder / "run")[-1]["step"] == outcome(folder / "run")["step"]


def test_a_wrong_input_has_its_exit_code_without_a_stream_for_the_message(begin):
    for redirect, words in zip(REDIRECTS, cycle(["run missing.toml", "run", "unknown"]), strict=False):
        assert begin(words, redirect, **QUIET).wait(PATIENCE) == 2


@pytest.mark.wide
def test_names_are_escaped_on_the_terminal(folder, start):
    name = "red\x1b[31m two\nlines right\u202eleft " + os.fsdecode(b"latin-\xe9")
    words = ("run", "small.toml", "--out", folder / name, "--set", "run.steps=1")
    code, out, err = finish(start(folder, *words, fresh=True, PYTHONIOENCODING="utf-8:strict"))
    assert code == 0, err
    assert saved_steps(folder / name) == [1]
    text = out + err
    check_facts(text, "config.toml", r"two\nlines", r"latin-\udce9")
    assert not set(text) & set("\x1b\u202e")
    check_facts(output(finish(start(folder, "resume", folder / name))), "1 of 1 steps")
