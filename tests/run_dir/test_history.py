import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff import UserError
from hookdiff.run_dir.events_jsonl import parse_event
from hookdiff.run_dir.history import History, find_runs
from hookdiff.run_dir.lines import Logged, Skim
from hookdiff.run_dir.metrics_jsonl import parse_metrics
from hookdiff.run_dir.pictures_png import find_pictures, newest_picture
from tests.conftest import PATIENCE, check_facts, locked, output, refused
from tests.forked import python
from tests.run_dir.test_pictures_png import save

HOLDS = """
import sys
from contextlib import ExitStack
from pathlib import Path
from hookdiff.disk.lock import lock_run_dir
with ExitStack() as resources:
    lock_run_dir(Path(sys.argv[1]), resources)
    print("locked", flush=True)
    sys.stdin.read()
"""
IS_LOCKED = """
import sys
from pathlib import Path
from hookdiff.disk.lock import is_locked
print(is_locked(Path(sys.argv[1])))
"""
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")


def run_dir(path: Path, config: str = "[run]\nsteps = 10\n", **files: Any) -> Path:
    """Make a run directory; text is written as it is, other values as lines of JSON."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config)
    for name, content in files.items():
        text = content if isinstance(content, str) else "".join(f"{json.dumps(line)}\n" for line in content)
        (path / (name if name == "outcome.json" else f"{name}.jsonl")).write_text(text)
    return path


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of a run directory until its stdin ends."""
    command = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


@posix
def test_a_run_is_running_while_a_process_holds_its_lock_and_crashed_once_that_is_killed(tmp_path: Path) -> None:
    history = History(run_dir(tmp_path / "run"))
    assert history.state == "crashed"
    with holder(history.run_dir) as process:
        assert [history.state for _ in range(3)] == ["running"] * 3  # to look takes no lock away
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        assert history.state == "crashed"


@posix
def test_a_run_that_released_its_lock_has_the_state_of_its_outcome(tmp_path: Path) -> None:
    history = History(run_dir(tmp_path / "run"))
    with holder(history.run_dir) as process:
        (history.run_dir / "outcome.json").write_text('{"reason": "done", "step": 7}')
        assert history.state == "running"
        process.communicate(timeout=PATIENCE)  # ends stdin
    assert (history.state, history.step) == ("done", 7)


@posix
def test_a_reader_in_the_process_of_the_training_leaves_it_the_lock(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run")
    (tmp_path / "link").symlink_to(path)
    with locked(path):
        for _ in range(3):  # the system releases the lock if the process closes any descriptor of the file
            assert History.of(tmp_path / "link").state == History.of(path).state == "running"
            assert [run.state for run in find_runs(tmp_path)] == ["running"]
        assert python(IS_LOCKED, path) == (0, "True\n", "")
    assert python(IS_LOCKED, path) == (0, "False\n", "")


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ('{"reason": "done"}', "done"),
        ('{"reason": "error"}', "crashed"),
        ('{"reason": "signal"}', "stopped"),
        ('{"reason": "time"}', "stopped"),
        ('{"reason": "on_nan"}', "stopped"),
        ("{}", "crashed"),
    ],
    ids=lambda text: text[:20],
)
def test_the_state_of_a_run_that_is_over(tmp_path: Path, outcome: str, state: str) -> None:
    assert History(run_dir(tmp_path / "run", **{"outcome.json": outcome})).state == state


def test_of_several_values_of_a_step_the_last_one_counts(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "time": 1.0, "loss": 9},
        {"step": 3, "time": 3.0, "loss": 7},
        {"step": 3, "time": 4.0, "fd/x": None},
        {"step": 2, "time": 5.0, "loss": 8},
        {"step": 3, "time": 6.0, "loss": 6},
    ]
    history = History(run_dir(tmp_path / "run", metrics=lines))
    assert (history.series["loss"], history.times) == (([1, 2, 3], [9, 8, 6]), ([1, 2, 3], [1, 5, 6]))
    assert math.isnan(history.last("fd/x"))
    assert math.isnan(history.last("not logged"))
    assert history.last("loss") == 6


def test_the_step_is_that_of_the_last_line_or_of_the_end(tmp_path: Path) -> None:
    lines = [{"step": 5, "time": 1.0}]
    assert (History(run_dir(tmp_path / "new")).step, History(run_dir(tmp_path / "cut", metrics=lines)).step) == (0, 5)
    assert History(run_dir(tmp_path / "end", metrics=lines, **{"outcome.json": '{"step": 6}'})).step == 6
    assert History(run_dir(tmp_path / "odd", metrics=lines, **{"outcome.json": '{"step": "6"}'})).step == 5


def test_damaged_lines_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"step": 1, "time": 2.0, "kind": "finding", "severity": "warning", "text": "a\x1b[2Jb"}
    bad: list[Any] = [
        *([], 3, None, "x", {}, {**good, "severity": "fatal"}, {**good, "text": 5}, {**good, "step": None}),
        *({**good, "details": []}, {**good, "time": "now"}, {**good, "step": 10**400}),
    ]
    lines = "".join(f"{json.dumps(line)}\n" for line in [good, *bad, {**good, "details": {"a": [1]}}])
    path = run_dir(tmp_path / "run", events=f"{lines}\xff\x00\n{'[' * 100_000}\n\n{json.dumps(good)}\n")
    events = History(path).events
    assert [(logged.step, logged.time, logged.event.text) for logged in events] == [(1, 2.0, "a\x1b[2Jb")] * 3
    assert events[1].event.details == {"a": [1]}
    check_facts(caplog.text, path / "events.jsonl", "line 2", len(bad) + 2)


def test_a_half_written_last_line_is_left_out_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_dir(tmp_path / "run", metrics='{"step": 1, "loss": 3}\n{"step": 2, "lo')
    assert [(line.step, line.values) for line in History(path).metrics] == [(1, {"loss": 3})]
    assert not caplog.text
    path = run_dir(tmp_path / "edited", metrics='{"step": 1, "loss": 3}\n{"step": 2}')
    assert [(line.step, line.values) for line in History(path).metrics] == [(1, {"loss": 3}), (2, {})]


def test_a_run_is_found_by_its_directory_and_by_a_checkpoint(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run")
    (path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert (History.of(path).run_dir, History.of(path / "checkpoints" / "step-00000001").run_dir) == (path, path)
    assert History.of(path).config == {"run": {"steps": 10}}
    with refused(UserError, tmp_path / "rum", "'run'"):
        History.of(tmp_path / "rum")
    with refused(UserError, tmp_path, "config.toml"):
        History.of(tmp_path)


def test_runs_are_found_three_folders_deep(tmp_path: Path) -> None:
    for name in ("b", "a/1", "a/2", "a/x/y", "a/x/y/z", ".hidden/run", "b/inside"):
        run_dir(tmp_path / name)
    for name in ("a", "c/d/e/f"):
        run_dir(tmp_path / "deep" / name)
    (tmp_path / "a" / "x" / "y" / "config.toml").unlink()
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "metrics.jsonl").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "b" / "metrics.jsonl").touch()
    run_dir(tmp_path / "project" / "runs")
    (tmp_path / "project" / "config.toml").touch()  # no sign of a run, as other projects have one
    (tmp_path / "link").symlink_to(tmp_path / "b")
    names = [run.run_dir.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path)]
    assert names == ["a/1", "a/2", "b", "deep/a", "lost", "project/runs"]
    assert [run.run_dir for run in find_runs(tmp_path / "b")] == [tmp_path / "b"]
    assert [run.run_dir for run in find_runs(tmp_path / "a" / "x")] == [tmp_path / "a" / "x" / "y" / "z"]
    assert find_runs(tmp_path / "file") == find_runs(tmp_path / "none") == find_runs(tmp_path / "empty") == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    run_dir(tmp_path / "a")
    secret = run_dir(tmp_path / "b")
    secret.chmod(0)
    assert [run.run_dir.name for run in find_runs(tmp_path)] == ["a", "b"]
    with refused(UserError, secret / "config.toml"):
        assert find_runs(tmp_path)[1].config
    secret.chmod(0o700)


def test_pictures_are_those_that_a_run_has_logged(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run")
    files = {step: save(path, "samples", step) for step in (1000, 5, 200_000_000)}
    inner = save(path, "samples/denoising", 5)
    foreign = Image.fromarray(numpy.zeros((2, 3), numpy.uint8))
    foreign.save(path / "samples" / "step-00000900.png")
    foreign.save(path / "step-00000900.png")
    for name in ("step-00000007.jpg", "step-7.png", "step-00000007.png.partial"):
        (path / "samples" / name).write_bytes(files[5].read_bytes())
    (path / "samples" / "step-00000008.png").mkdir()
    if os.name != "nt":
        os.mkfifo(path / "samples" / "step-00000009.png")
    pictures = find_pictures(path)
    assert pictures == {"samples": {step: files[step] for step in sorted(files)}, "samples/denoising": {5: inner}}
    assert (list(pictures["samples"]), newest_picture(path, "samples")) == ([5, 1000, 200_000_000], files[200_000_000])
    files[200_000_000].write_bytes(b"no picture")
    assert (newest_picture(path, "samples"), newest_picture(path, "samples/denoising")) == (files[1000], inner)
    assert newest_picture(path, "others") is None


def test_a_damaged_picture_raises_no_error(tmp_path: Path) -> None:
    path = save(run_dir(tmp_path / "run"), "samples", 1)
    whole = path.read_bytes()
    random = numpy.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(whole[: random.integers(len(whole) + 1)])
        for place in random.integers(max(1, len(damaged)), size=random.integers(4)):
            damaged[place : place + 1] = random.bytes(1)
        path.write_bytes(damaged)
        assert newest_picture(path.parents[1], "samples") in (path, None)


def test_a_picture_that_would_fill_the_memory_is_left_out(tmp_path: Path) -> None:
    path = save(run_dir(tmp_path / "run"), "samples", 1)
    whole = path.read_bytes()
    header = b"IHDR" + (200_000).to_bytes(4, "big") * 2 + whole[24:29]  # with width and height
    path.write_bytes(whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:])
    assert (find_pictures(path.parents[1]), newest_picture(path.parents[1], "samples")) == ({}, None)


def test_skim_parses_the_lines_that_are_asked_for(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": step / 2} for step in range(10)]
    lines[3] |= {"fd/x": 5.0, "fd/x/num": 10}
    lines[7] |= {"fd/y": 4.0}
    parsed = []

    def parse(line: dict[str, Any]) -> Logged[float]:
        parsed.append(line["step"])
        return parse_metrics(line)

    skim = Skim(run_dir(tmp_path / "run", metrics=lines) / "metrics.jsonl", parse)
    assert ([line.step for line in skim.having("fd/")], next(skim.backwards()).step) == ([3, 7], 9)
    assert (next(skim.backwards("fd/y")).step, parsed) == (7, [3, 7, 9, 7])
    assert [line.step for line in skim.backwards()] == [*range(9, -1, -1)]
    assert [line.step for line in skim.backwards("fd/")] == [7, 3]
    assert list(skim.having("none")) == list(skim.backwards("none")) == []


def test_skim_reads_events_and_raises_an_error_for_what_is_no_file(tmp_path: Path) -> None:
    line = {"step": 1, "time": 2.0, "kind": "stop", "severity": "info", "text": "done"}
    path = run_dir(tmp_path / "run", events=[line, {**line, "step": 2}, {}])
    assert next(Skim(path / "events.jsonl", parse_event).backwards()).step == 2
    for name in (".", "none"):
        with pytest.raises(OSError, match=r".+"):
            Skim(path / name, parse_event)


def test_the_history_imports_no_torch(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", metrics=[{"step": 1, "time": 2.0}])
    save(path, "samples", 1)
    code = """
import sys
from hookdiff.run_dir.history import History
run = History.of(sys.argv[1])
print(run.config, run.state, run.metrics, run.events, run.texts, run.distributions, len(run.pictures))
print("torch" in sys.modules)
"""
    out = output(python(code, path, fresh=True))
    assert out == "{'run': {'steps': 10}} crashed [Logged(step=1, time=2.0, values={})] [] [] [] 1\nFalse\n"
