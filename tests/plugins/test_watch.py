"""The command `hookdiff watch`."""

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from hookdiff.log.picture import Picture
from tests.conftest import IMPORTS, check_facts, finish, imported, locked, output, wait_for, write_small

if os.name == "nt":
    pytest.skip("needs a pseudo terminal", allow_module_level=True)

from tests.pseudo_terminal import Terminal, shown

CONFIG = "[run]\nsteps = 100\nbatch_size = 8\n"
FAST = ("--every", "0.1")
HOSTILE = "\x1b[2J\x1b]0;title\x07\u202e\x9b31m\r\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory with nothing but a config."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text(CONFIG)
    return path


def log(path: Path, step: int, when: float | None = None, **values: float | None) -> None:
    """Append a line to the metrics, of now or of another time."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": when or time.time(), **named}) + "\n")


def happen(path: Path, step: int, kind: str, text: str = "", severity: str = "info", when: float | None = None) -> None:
    """Append an event, of now or of another time."""
    line = {"step": step, "time": when or time.time(), "kind": kind, "severity": severity, "text": text}
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def end(path: Path, reason: str = "done", message: str = "", step: int = 0) -> None:
    (path / "outcome.json").write_text(json.dumps({"reason": reason, "message": message, "step": step, "epoch": 1}))


def save(path: Path, step: int, pixels: Any, **info: Any) -> Path:
    file = path / "samples" / f"step-{step:08}.png"
    Picture(numpy.array(pixels, numpy.uint8), {"name": "samples", "step": step, **info}).save(file)
    return file


GOLDEN = """\
run  done  step 100/100
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
loss 0.01  grad_norm 0.5  lr 0.001  fd/digits 3 (best 2 at step 60)

loss
       1 ⠉⠒⠢⠤⣀
              ⠉⠑⠒⠤⢄⡀
                   ⠈⠉⠒⠢⠤⣀⡀
                         ⠈⠉⠒⠤⢄⣀
                               ⠉⠑⠢⠤⣀⡀
                                    ⠈⠉⠒⠤⣀⡀
                                         ⠈⠑⠢⠤⣀⡀
                                              ⠈⠉⠒⠢⠤⣀⡀
                                                    ⠈⠉⠒⠤⢄⣀
                                                          ⠉⠑⠒⠤⢄⡀
                                                               ⠈⠉⠒⠢⠤⣀
                                                                     ⠉⠑⠒⠤⢄⣀
    0.01                                                                   ⠉⠑⠢⠤⣀
         0                             log scale                             100
fd/digits                  grad_norm                  lr
       4 ⠑⡄                                              0.001              ⢀⠔⠊
          ⠈⢆                                                              ⡠⠔⠁
            ⠣⡀          ⡠                                              ⢀⠔⠉
             ⠑⢄      ⢀⠔⠊        0.5 ⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉                ⣀⠤⠊⠁
              ⠈⢢   ⢀⠔⠁                                           ⢀⠔⠊
       2        ⠱⡠⠊⠁                                         0 ⡠⠔⠁

step 0  start: started
step 60  finding: learning rate too high
step 100  checkpoint (2 times): saved step-00000100
"""


def test_a_snapshot_in_a_pipe(run: Path, hookdiff: Callable[..., Any]) -> None:
    for step in range(0, 101, 10):
        log(run, step, loss=10 ** (-step / 50), grad_norm=0.5, lr=step * 1e-5)
    for step, value in ((20, 4.0), (60, 2.0), (100, 3.0)):
        log(run, step, fd__digits=value, fd__digits__num=1000.0, fd__digits__floor=0.1)
    happen(run, 0, "start", "started")
    happen(run, 60, "finding", "learning rate too high\n  why", "warning")
    for step in (50, 100):
        happen(run, step, "checkpoint", f"saved step-{step:08}")
    end(run)
    assert hookdiff("watch", run) == (0, GOLDEN, "")
    assert hookdiff("watch", run, "--once")[1] == GOLDEN


def test_a_run_is_followed_to_its_end(run: Path) -> None:
    with Terminal(run.parent, "watch", run, *FAST) as terminal:
        with locked(run):
            terminal.wait_for("running", "step 0/100")
            now = time.time()
            happen(run, 0, "start", "started", when=now - 20)
            log(run, 10, now - 15, loss=0.75)
            terminal.wait_for("step 10/100", "2 steps/s", "16 img/s")
            log(run, 20, now - 5, loss=0.5)
            terminal.wait_for("step 20/100", "loss 0.5", "started", "  1 steps/s", "  8 img/s", "ETA")
            happen(run, 30, "nan", "step 30 is not finite", "error")
            terminal.wait_for("nan: step 30 is not finite")
            save(run, 30, [[0, 255]])
            terminal.wait_for("samples, step 30")
            log(run, 96, loss=0.25)  # the last steps have no line
            end(run, "signal", "SIGTERM", step=100)
            terminal.wait_for("step 96/100", "running")  # until the lock is released
        code, left = terminal.finish()
    assert code == 0
    check_facts(left, "stopped", "SIGTERM", "step 100/100", "loss 0.25")
    assert terminal.written.count("\x1b[?25l") == terminal.written.count("\x1b[?25h") == 1  # the cursor
    assert terminal.written.count("\x1b[?1049h") == terminal.written.count("\x1b[?1049l") == 1  # the other screen


def test_a_run_of_epochs_says_how_many_steps_it_expects(run: Path, hookdiff: Callable[..., Any]) -> None:
    (run / "config.toml").write_text("[run]\nepochs = 3\n")
    log(run, 20, loss=0.5)
    for steps in (50, 60):  # the second time with another batch size
        line = {"step": 0, "time": 1.0, "kind": "resume", "severity": "info", "text": "", "details": {"steps": steps}}
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    check_facts(hookdiff("watch", run)[1], "step 20/60")


def test_warnings_are_not_pushed_out_by_what_is_usual(run: Path, hookdiff: Callable[..., Any]) -> None:
    log(run, 20, loss=0.5)
    happen(run, 5, "finding", "an older warning", "warning")
    happen(run, 10, "finding", "gradients explode", "error")
    for step in range(11, 20):
        happen(run, step, "resume", f"resumed at step {step}")
    end(run)
    notes = hookdiff("watch", run)[1].splitlines()[-6:]
    assert [re.findall(r"step (\d+)", note)[0] for note in notes] == ["5", "10", "16", "17", "18", "19"]


@pytest.mark.parametrize("how", ["keys", "SIGTERM"])
def test_an_interrupted_watch_restores_the_terminal(run: Path, how: str) -> None:
    with locked(run), Terminal(run.parent, "watch", run, "--every", "60") as terminal:
        terminal.wait_for("running", "step 0/100")
        if how == "keys":
            terminal.press(b"\x03")
        else:
            terminal.process.send_signal(signal.SIGTERM)
        code, left = terminal.finish()
    assert code == (130 if how == "keys" else 143)
    assert "Traceback" not in left
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")
    assert terminal.written.rindex("\x1b[?1049l") > terminal.written.rindex("\x1b[?1049h")


def test_the_speed_is_that_of_the_last_process(run: Path, hookdiff: Callable[..., Any]) -> None:
    now = time.time()
    for step in range(41):
        log(run, step, now - 1000 + step / 100)
    happen(run, 30, "resume", "resumed", when=now - 200)
    for step in range(41, 71):
        log(run, step, now - 180 + 2 * (step - 40))
    with locked(run):
        out = hookdiff("watch", run)[1]
    check_facts(out, "running", "step 70/100", "0.5 steps/s", "4 img/s")
    (run / "config.toml").write_text("[run]\nsteps = 1000\n")
    with locked(run):
        out = hookdiff("watch", run)[1]
    assert "img/s" not in out
    found = re.search(r"ETA (\d+):(\d\d)  last line (\d+):(\d\d) ago", out)
    assert found
    minutes, seconds, *age = map(int, found.groups())
    # 930 steps at this speed are 31 minutes, from the last line on.
    assert 60 * (minutes + age[0]) + seconds + age[1] == pytest.approx(31 * 60, abs=2)


def test_a_run_that_is_cut_and_replaced(run: Path) -> None:
    for step in range(10, 60, 10):
        log(run, step, loss=step, fd__x=step)
    with locked(run), Terminal(run.parent, "watch", run, *FAST) as terminal:
        terminal.wait_for("step 50/100", "loss 50", "best 10 at step 10")
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[1:3]))
        terminal.wait_for("step 30/100", "loss 30", "best 20 at step 20")
        (run / "new").write_text(lines[0])
        (run / "new").replace(run / "metrics.jsonl")
        (run / "config.toml").write_text("[run]\nsteps = 7000\n")
        terminal.wait_for("step 10/7,000", "loss 10")
        (run / "metrics.jsonl").unlink()
        terminal.wait_for("step 0/7,000")
        assert "loss" not in terminal.screen


def test_a_run_that_has_not_started_is_waited_for(run: Path) -> None:
    with Terminal(run.parent, "watch", run, *FAST) as terminal:
        terminal.wait_for("not started", "step 0/100")
        shutil.rmtree(run)
        terminal.wait_for("missing")
        run.mkdir()
        (run / "config.toml").write_text(CONFIG)
        terminal.wait_for("not started")
        with locked(run):
            terminal.wait_for("running")
            log(run, 5, loss=1)
            terminal.wait_for("step 5/100")
        code, left = terminal.finish()
    assert code == 0
    check_facts(left, "crashed", "step 5/100")


def test_a_terminal_that_changes_its_size(run: Path) -> None:
    log(run, 50, loss=1)
    with locked(run), Terminal(run.parent, "watch", run, "--every", "60", columns=120) as terminal:
        terminal.wait_for("running", "━" * 60 + "─" * 60)
        terminal.resize(40, 20)
        terminal.wait_for("\n" + "━" * 20 + "─" * 20 + "\n")
        assert max(map(len, terminal.screen.splitlines())) <= 40


@pytest.mark.parametrize("size", [(40, 10), (40, 50), (71, 24), (80, 24), (100, 6), (120, 40), (250, 70), (20, 3)])
def test_nothing_is_wider_or_higher_than_the_terminal(run: Path, size: tuple[int, int]) -> None:
    for step in range(100):
        log(run, step, loss=2 + math.sin(step), loss__smooth=2, grad_norm=1, lr=0.1, fd__a=step, fid__b__c=step)
        happen(run, step, "finding", "a long text " * 30)
    save(run, 50, numpy.zeros((90, 160, 3)))
    end(run, "error", "a long message " * 20)
    columns, lines = size
    left, _ = shown(run.parent, "watch", run, "--once", columns=columns, lines=lines)
    assert max(map(len, left.splitlines())) <= columns
    assert len(left.splitlines()) < lines
    assert left.startswith("run")
    if lines >= 24:
        assert any("\u2801" <= letter <= "\u28ff" for letter in left)
        assert "samples, step 50" in left
        assert "finding" in left


COLOURS = [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 9, 9]]]


def test_a_picture_has_its_colours(run: Path) -> None:
    save(run, 1, COLOURS)
    end(run)
    _, written = shown(run.parent, "watch", run, "--once")
    # Half blocks: the upper pixel is the foreground, the lower one the background.
    pairs = [("38;2;255;0;0", "48;2;0;0;255"), ("38;2;0;255;0", "48;2;9;9;9")]
    assert re.findall(r"\x1b\[([\d;]+);(48[\d;]+)m\u2580", written) == pairs


def test_a_grey_picture_on_a_terminal_of_256_colours(run: Path) -> None:
    save(run, 1, [[255, 0], [0, 255]])
    end(run)
    _, written = shown(run.parent, "watch", run, "--once", COLORTERM="")
    found = re.findall(r"\x1b\[38;5;(\d+);48;5;(\d+)m\u2580", written)
    assert len(found) == 2
    assert found[0] == found[1][::-1]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"TERM": "xterm", "COLORTERM": ""}])
def test_a_terminal_without_colours_gets_the_path_of_the_samples(run: Path, environment: dict[str, str]) -> None:
    file = save(run, 1, COLOURS)
    log(run, 5, loss=1)
    end(run)
    left, _ = shown(run.parent, "watch", run.name, "--once", **environment)
    check_facts(left, file.relative_to(run.parent), "step 5/100")
    assert "\u2580" not in left


def test_the_samples_of_a_grid_are_shown_one_by_one(run: Path) -> None:
    pixels = numpy.zeros((50, 50, 3))
    for row in range(2):
        for column in range(2):
            pixels[2 + 24 * row : 22 + 24 * row, 2 + 24 * column : 22 + 24 * column] = (10 + row, 20 + column, 30)
    panel = {"left": 2, "top": 2, "width": 20, "height": 20, "right": 24, "down": 24, "columns": 2, "num": 4}
    save(run, 1, pixels, panels=[{"title": "ema", **panel}])
    end(run)
    left, written = shown(run.parent, "watch", run, "--once", columns=80, lines=50)
    assert "samples, step 1, ema" in left
    colours = set(re.findall(r"38;2;(\d+;\d+;\d+)", written))
    assert colours == {"10;20;30", "10;21;30", "11;20;30", "11;21;30"}  # without the gaps between them


@pytest.mark.parametrize(
    "panel",
    [
        *({key: bad} for key in ("left", "num", "columns", "width", "right") for bad in (-1, 10**9, "x", None, 0.5)),
        *({"num": 0}, {"columns": 0}, {"height": 0}, {"title": 5}),
    ],
    ids=str,
)
def test_a_forged_place_of_the_samples_shows_the_whole_picture(run: Path, panel: dict[str, Any]) -> None:
    from hookdiff_watch.picture import half_blocks

    good = {"title": "", "left": 0, "top": 0, "width": 1, "height": 1, "right": 1, "down": 1, "columns": 2, "num": 4}
    lines = half_blocks(save(run, 1, COLOURS, panels=[{**good, **panel}]), 10, 10)
    assert [line.plain for line in lines] == ["samples, step 1", "\u2580\u2580"]


def test_a_picture_that_is_cut_off(run: Path) -> None:
    file = save(run, 1, numpy.random.default_rng(0).integers(0, 256, (50, 50, 3)))
    file.write_bytes(file.read_bytes()[:-2000])
    end(run)
    check_facts(shown(run.parent, "watch", run, "--once", columns=200)[0], file.name)


@pytest.mark.parametrize(
    "values",
    [
        [None],
        [None, None, None],
        [0.5],
        [0.0, 0.0],
        [-1.0, 1.0],
        [1e308, -1e308, None],
        [5e-324, 1.7e308],
        [None, 1.0, None, 2.0, None],
    ],
    ids=str,
)
def test_any_values_can_be_drawn(run: Path, hookdiff: Callable[..., Any], values: list[float | None]) -> None:
    for step, value in enumerate(values):
        log(run, step, loss=value, lr=value, fd__x=value)
    log(run, 10**30, loss=1.0)  # no step of a run
    end(run)
    out = output(hookdiff("watch", run))
    last = math.nan if values[-1] is None else values[-1]
    check_facts(out, f"loss {last:.4g}", f"lr {last:.4g}", f"step {len(values) - 1}/100")


def test_what_a_run_directory_says_is_escaped(run: Path) -> None:
    path = run.with_name(f"x{HOSTILE}")
    run.rename(path)
    (path / "config.toml").write_text(f"[run]\nsteps = {'1' * 4000}\nbatch_size = 'x'\n")
    log(path, 1, **{f"fd__{HOSTILE}": 1.0, "loss": 2.0})
    happen(path, 1, HOSTILE, HOSTILE, "error")
    happen(path, 1, "finding", f"abc{HOSTILE}", "error")
    save(path, 1, COLOURS, panels=[{"title": HOSTILE}])
    end(path, "error", HOSTILE)
    _, written = shown(path.parent, "watch", path, "--once", columns=250, lines=50)
    plain = re.sub(r"\x1b\[[\d;]*m", "", written.replace("\r\n", "\n"))
    assert not re.search(r"[^\n\x20-\uffff]|[\x7f-\x9f\u202e]", plain)
    check_facts(written, "x1b", "step 1", "loss 2", "abc")


def test_files_that_are_damaged(run: Path, hookdiff: Callable[..., Any]) -> None:
    (run / "config.toml").write_text("[run")
    (run / "metrics.jsonl").write_bytes(b'{"step": 3, "loss": 1}\n\xff\n{"step": 4, "loss"')
    (run / "events.jsonl").mkdir()
    (run / "samples").write_text("no folder")
    (run / "outcome.json").write_text("[]")
    check_facts(output(hookdiff("watch", run)), "crashed", "step 3", "loss 1", "config.toml")


def test_a_pipe_that_takes_only_ascii(run: Path, start: Callable[..., Any]) -> None:
    log(run, 5, loss=1)
    log(run, 9, loss=0.5)
    end(run)
    code, out, err = finish(start(run.parent, "watch", run, fresh=True, PYTHONIOENCODING="ascii"))
    assert (code, err) == (0, "")
    assert out.isascii()
    check_facts(out, "step 9/100", "loss 0.5", "done")


def test_a_terminal_of_the_c_locale(run: Path) -> None:
    happen(run, 1, "finding", "long " * 50, "warning")
    happen(run, 2, "finding", "größer")
    end(run)
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    left, _ = shown(run.parent, "watch", run, fresh=True, **c_locale)
    assert left.isascii()
    assert max(map(len, left.split("\n"))) <= 80


def test_nothing_is_written_and_torch_is_not_imported(run: Path, start: Callable[..., Any]) -> None:
    log(run, 5, loss=1, fd__x=2.0)
    happen(run, 5, "stop")
    save(run, 5, COLOURS)
    end(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, out, times = finish(start(run.parent, "watch", run, fresh=True, python=IMPORTS))
    assert code == 0
    check_facts(out, "step 5/100")
    assert "torch" not in imported(times)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.wide
def test_a_training_is_watched_to_its_end(tmp_path: Path, start: Callable[..., Any]) -> None:
    config = write_small(
        tmp_path / "small.toml",
        run={"steps": 8, "log_every": 1, "plugins": ["samples"]},
        plugins={"samples": {"every": 4, "num": 4}},
    )
    training = start(tmp_path, "run", config, "--out", "run")
    wait_for(tmp_path / "run" / "metrics.jsonl", training)
    with Terminal(tmp_path, "watch", "run", *FAST) as terminal:
        code, left = terminal.finish()
        assert finish(training)[0] == 0
    assert code == 0
    check_facts(left, "done", "step 8/8", "samples, step 8", "loss", "stop")
