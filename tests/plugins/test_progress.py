import logging
import math
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import nn

from hookdiff import Loop, LoopConfig
from hookdiff.data import digits
from hookdiff.terminal import paced
from hookdiff.testing.toy import toy_loop
from hookdiff_debug import Debug
from hookdiff_ema import EMA
from hookdiff_gradients import GradientMonitor
from hookdiff_loss import LossMonitor
from hookdiff_memory import Memory
from hookdiff_progress import ProgressBar
from hookdiff_progress.picture import sparkline
from tests.conftest import Clock, Logged, Restores, StopAt, acting, check_facts, ran, wait_until, warnings

Capture = pytest.CaptureFixture[str]


def make_loop(plugins: Mapping[str, object], **config: Any) -> Loop:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = LoopConfig(**{"log_every": 2, **config})
    return Loop(model, optimizer, lambda net, batch: net(batch.inputs).square(), digits(), limits, plugins)


class Output:
    """Reads the output of a pipe or terminal as it is written."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.read = descriptor, bytearray()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                data = os.read(self.descriptor, 65536)
            except OSError:  # a terminal's end of file
                return
            if not data:
                return
            self.read += data

    def text(self) -> str:
        """Return all of it, once the other side is closed."""
        self.thread.join(300)
        assert not self.thread.is_alive()
        os.close(self.descriptor)
        return self.read.decode()


@contextmanager
def stderr_to(stream: TextIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch, stream:
        patch.setattr(sys, "stderr", stream)
        yield


@contextmanager
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    reading, writing = os.pipe()
    with stderr_to(os.fdopen(writing, "w"), monkeypatch):
        yield Output(reading)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[Output]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))  # rich asks file descriptors 0 to 2, and this is none of them
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    reading, writing = pty.openpty()
    with stderr_to(os.fdopen(writing, "w"), monkeypatch):
        yield Output(reading)


def screen(output: str) -> list[str]:
    """Return the lines of a terminal after `output`; it knows the codes that rich uses: up, erase, carriage return."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0  # a terminal makes \r\n of it
            if row == len(lines):
                lines.append("")
        elif token.endswith("A"):
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def evaluate(loop: Loop) -> None:
    if loop.log.due:
        loop.log({"lr": 0.125, "clip/share": 0.5})
    if loop.progress.step == 4:
        loop.log({"fd/digits": 12.3456})


EVALUATION = acting(after_optimizer_step=evaluate)


def test_golden_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pipe(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "evaluation": EVALUATION, "clock": Clock(monkeypatch)}, steps=6).run()
    lines = output.text().splitlines()
    number = r"[-\d.e]+"
    shown = rf"loss {number}  lr 0\.125  grad_norm {number}"
    end = r"  clip/share 0\.5  memory [\d.]+ [MG]iB"
    for line, step, more in zip(lines, (2, 4, 6), ("", r"  fd/digits 12\.35", ""), strict=True):
        assert re.fullmatch(rf"step {step}/6  {shown}  [\d,]+ img/s  ETA [\d:]+(?: s)?{more}{end}", line), line


def test_a_pipe_gets_a_line_now_and_then_with_all_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def log(loop: Loop) -> None:
        clock.now += 1
        if loop.progress.step == 25:
            loop.log({"fd/digits": 12.0})

    clock = Clock(monkeypatch)
    with pipe(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "logs": acting(after_optimizer_step=log)}, steps=2000, log_every=1).run()
    lines = output.text().splitlines()
    steps = [int(line.split("/")[0].removeprefix("step ").replace(",", "")) for line in lines]
    gaps = [later - step for step, later in pairwise(steps)]
    assert (steps[0], steps[-1]) == (1, 2000)
    assert (set(gaps[:8]), gaps[-2]) == ({10}, 60)
    assert gaps[:-1] == sorted(gaps[:-1])
    assert [line for line in lines if "fd/digits 12 (step 25)" in line] == [lines[steps.index(31)]]


def test_a_pipe_gets_a_line_each_minute_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "clock": Clock(monkeypatch)}, steps=50, log_every=20).run()
    lines = output.text().splitlines()
    assert [re.findall(r"step (\d+)/50|(loss)", line) for line in lines] == [
        [(f"{step}", ""), *[("", "loss")] * (step % 20 == 0)] for step in (6, 12, 18, 20, 26, 32, 38, 40, 46, 50)
    ]
    assert "ETA 0 s" in lines[-1]


def test_values_of_an_earlier_step_say_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe(monkeypatch) as output:
        make_loop({"bar": ProgressBar()}, steps=5, log_every=2).run()
    assert re.search(r"step 5/5  loss [\d.]+  grad_norm [\d.]+ \(step 4\)  ", output.text().splitlines()[-1])


def test_lines_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe(monkeypatch) as output, make_loop({"bar": ProgressBar()}, steps=4) as loop:
        for step in loop.steps():
            if step.step == 3:
                wait_until(lambda: b"step 2/4" in output.read)
    output.text()


def test_golden_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = sys.stderr
    with terminal(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "evaluation": EVALUATION}, steps=6).run()
    assert sys.stderr is stderr
    text = output.text()
    bar, values, more, *rest = screen(text)
    assert re.fullmatch(r"step 6/6  ━+  100%  ETA 0 s  [\d,]+ img/s", bar)
    losses = r"loss \S+ [▁▂▃▄▅▆▇█]{3}"
    assert re.fullmatch(rf"{losses}  lr 0.125  grad_norm \S+  memory \S+ [MG]iB  fd/digits 12.35 \(step 4\)", values)
    assert more == "clip/share 0.5"
    assert not any(rest)
    assert text.endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize(("begin", "steps"), [(0, 1), (0, 3), (900, 903)])
def test_a_bar_has_the_first_loss_until_one_is_logged(begin: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as output, make_loop({"bar": ProgressBar()}, steps=steps, log_every=50) as loop:
        loop.set_step(begin)
        loss, *_ = [step.loss for step in loop.steps()]
    label = f" (step {begin + 1})" if steps > begin + 1 else ""
    assert screen(output.text())[1].partition("  ")[0] == f"loss {loss:.4g}{label}"


def test_logging_and_printing_do_not_break_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(loop: Loop) -> None:
        logging.getLogger("hookdiff").warning("logged at %d", loop.progress.step)
        print("printed at", loop.progress.step, file=sys.stderr)
        clock.now += 10  # so that the bar is drawn again
        bar.before_step(loop)

    clock, bar = Clock(monkeypatch), ProgressBar()
    with terminal(monkeypatch) as output:
        handler = logging.StreamHandler()  # made before the bar, as logging.basicConfig does
        stream = handler.stream
        monkeypatch.setattr(logging.getLogger("hookdiff"), "handlers", [handler])
        make_loop({"bar": bar, "chatty": acting(after_optimizer_step=chat)}, steps=3).run()
        assert handler.stream is stream
    lines = [line for line in screen(output.text()) if line]
    assert lines[:6] == [f"{verb} at {step}" for step in (1, 2, 3) for verb in ("logged", "printed")]
    assert lines[6].startswith("step 3/3 ")
    assert lines[7].startswith("loss ")
    assert len(lines) == 8 + lines[-1].startswith("memory ")


def test_an_error_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as output:
        stderr = sys.stderr
        with pytest.raises(ZeroDivisionError):
            make_loop({"bar": ProgressBar(), "breaking": acting(after_optimizer_step=lambda: 1 / 0)}, steps=3).run()
        assert sys.stderr is stderr
        print("Traceback", file=sys.stderr)
    lines = screen(output.text())
    assert lines[0].startswith("step 1/3 ")
    assert "Traceback" in lines


@pytest.mark.parametrize("columns", [1, 9, 20, 30, 36, 40, 80, 300])
def test_a_bar_of_any_width_keeps_to_three_lines(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns) as output:
        make_loop({"bar": ProgressBar(), "evaluation": EVALUATION}, steps=30, log_every=1).run()
    lines = [line for line in screen(output.text()) if line]
    assert columns < 9 or lines
    assert len(lines) <= 3
    assert max(map(len, lines), default=0) <= columns
    assert columns < 20 or lines[0].startswith("step 30/30")
    assert columns < 20 or re.match(r"loss [\d.e-]+", lines[1])


def test_what_takes_long_gets_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample() -> None:
        for _ in paced(range(4), 400, "fid: images", size=lambda _: 100):
            for _ in paced(range(2), 2, "sampling", "steps", size=lambda _: 1):
                clock.now += 1

    clock = Clock(monkeypatch)
    with terminal(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "samples": acting(after_optimizer_step=sample)}, steps=1).run()
    text = output.text()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.search(r"fid: images  ━+[╸╺]?━+  200/400 images  4 s left", plain)
    assert re.search(r"sampling  ━+[╸╺]?━+  1/2 steps  1 s left", plain)
    assert not any("fid: images" in line for line in screen(text))


@pytest.mark.parametrize(("stop", "shown"), [(15, []), (25, ["20"]), (50, ["50"])])
def test_the_newest_checkpoint_is_shown(stop: int, shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def save(loop: Loop) -> None:
        if loop.progress.step in (20, 50):
            bar.on_checkpoint(Path("somewhere"), loop.progress.step)

    plugins = {"bar": (bar := ProgressBar()), "saves": acting(after_optimizer_step=save), "stop": StopAt(stop)}
    with terminal(monkeypatch) as output:
        make_loop(plugins, steps=80).run()
    assert re.findall(r"saved at (\d+)$", "\n".join(screen(output.text())), re.M) == shown


def test_a_bar_shows_how_far_it_is_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as output:
        monkeypatch.setenv("NO_COLOR", "1")
        make_loop({"bar": ProgressBar(), "stop": StopAt(3)}, steps=4).run()
    (bar,) = (line for line in screen(output.text()) if "step 3/4" in line)
    assert bar.startswith(f"step 3/4  {'━' * 45}{' ' * 15}  75%")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([1, 1], "▁▁"),
        ([0, 7, 3.5], "▁█▅"),
        ([math.nan, 0, math.inf, 1], "x▁x█"),
        ([-1.7e308, 1.7e308], "▁█"),
    ],
)
def test_sparkline(values: list[float], shown: str) -> None:
    assert sparkline(values) == shown


def test_other_ranks_show_nothing(second_rank: None, capsys: Capture) -> None:
    make_loop({"bar": ProgressBar()}, steps=2).run()
    assert capsys.readouterr() == ("", "")


def test_the_number_of_values_is_limited(capsys: Capture) -> None:
    def log(loop: Loop) -> None:
        loop.log({f"layer/{index}": 1.0 for index in range(100)})
        if loop.progress.step == 2:
            loop.log({"fd/digits": 2.0})

    make_loop({"bar": ProgressBar(), "layers": acting(after_optimizer_step=log)}, steps=2).run()
    line = capsys.readouterr().err.splitlines()[-1]
    assert "fd/digits 2  layer/0 1" in line
    assert 100 < len(line) <= 120
    assert re.search(r" 1(  memory \S+ .iB)?$", line)  # a value is shown whole or not at all


def test_details_are_for_the_sinks(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def log(loop: Loop) -> None:
        loop.log({"odd/inner": 1.0}, detail=True)
        if loop.progress.step == 3:
            loop.log({"fd/digits": 2.0})

    plugins = {"bar": ProgressBar(), "logs": acting(after_optimizer_step=log), "logged": (logged := Logged())}
    make_loop({**plugins, "clock": Clock(monkeypatch)}, steps=5, log_every=4).run()
    third, fourth, fifth = capsys.readouterr().err.splitlines()
    assert third.startswith("step 3/5  ")
    assert "  fd/digits 2  " in third
    assert fourth.startswith(f"step 4/5  loss {logged.of('loss')[4]:.4g}  grad_norm ")
    assert fifth.startswith("step 5/5  ")
    assert "odd" not in third + fourth + fifth
    assert list(logged.of("odd/inner").values()) == [1.0] * 5


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_an_epochs_end_brings_no_second_loss_of_its_step(on_a_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measures = acting(on_epoch_end=lambda loop: loop.log({"val/mine": 3.0}))
    with terminal(monkeypatch) if on_a_terminal else pipe(monkeypatch) as output:
        plugins = {"bar": ProgressBar(), "measures": measures, "logged": (logged := Logged())}
        make_loop(plugins, epochs=1, batch_size=300, log_every=5).run()
    assert [step for step, _ in logged.calls] == [5, 5]
    text = "\n".join(screen(output.text()))
    assert "step 5/5" in text
    shown = re.findall(r"(loss|val/mine) ([-\d.e]+)", text)
    assert shown == [("loss", f"{logged.of('loss')[5]:.4g}"), ("val/mine", "3")]


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_a_broken_stderr_switches_it_off_with_a_line_in_the_log(
    on_a_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def close(loop: Loop) -> None:
        clock.now += 10  # so that the bar is drawn again
        if loop.progress.step == 2:
            os.close(reading)

    clock = Clock(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    reading, writing = pty.openpty() if on_a_terminal else os.pipe()
    stream = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    before = sys.stdout
    plugins = {"breaks": acting(before_step=close), "bar": ProgressBar(), "clock": clock}
    loop = make_loop(plugins, steps=8, log_every=1)
    assert (loop.run(), loop.progress.step) == ("done", 8)
    assert (sys.stderr, sys.stdout) == (stream, before)
    (warning,) = warnings(caplog)
    check_facts(warning, "progress", "stderr")
    with suppress(OSError):
        stream.close()


@pytest.mark.parametrize("stream", [None, "closed", "/dev/full"])
def test_without_a_stderr_the_run_goes_on(
    stream: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    file = None if stream is None else open("/dev/full" if stream == "/dev/full" else os.devnull, "w")  # noqa: SIM115
    if file and stream == "closed":
        file.close()
    monkeypatch.setattr(sys, "stderr", file)
    loop = ran(ran(make_loop({"bar": ProgressBar()}, steps=4)))  # a second run tries again
    monkeypatch.undo()
    assert capsys.readouterr().out == ""  # where print writes if there is no stderr
    assert loop.progress.step == 4
    assert 1 <= len(warnings(caplog)) <= 2
    for warning in warnings(caplog):
        check_facts(warning, "progress", "stderr")
    if file:
        with suppress(OSError):
            file.close()


def test_lines_of_a_run_with_every_monitor_can_be_read(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monitors = {"ema": EMA(), "debug": Debug(), "loss": LossMonitor(), "gradients": GradientMonitor()}
    plugins = {"bar": ProgressBar(), "clock": Clock(monkeypatch), **monitors, "memory": Memory()}
    toy_loop(plugins, steps=20, log_every=5, micro_batch=4).run()
    lines = capsys.readouterr().err.splitlines()
    for line, step in zip(lines, (5, 10, 15, 20), strict=True):  # none for the looks of debug
        assert re.match(rf"step {step}/20  loss \S+  grad_norm \S+  [\d,.]+ img/s  ETA \S+(?: s)?  ", line), line
        assert len(line) <= 120
        names = re.findall(r"\w+/[\w/]+(?= )", line.partition("ETA")[2])
        known = {"ema/distance", "loss/smooth", "gradients/update_ratio", "gradients/noise_scale", "memory/peak"}
        assert set(names) <= known, line
        assert len(names) >= 2


@pytest.mark.parametrize(
    ("config", "position", "total"),
    [
        ({"steps": 100}, (30, 2, 256), 100),
        ({"epochs": 3}, (0, 0, 0), 42),  # 1,797 samples are 14 batches of 128
        ({"epochs": 3}, (16, 1, 256), 42),
        ({"epochs": 3}, (14, 1, 256), 40),  # two batches so far brought no update
        ({"epochs": 3, "steps": 20}, (16, 1, 256), 20),
        ({}, (16, 1, 256), None),
    ],
)
def test_total_steps(config: dict[str, int], position: tuple[int, int, int], total: int | None) -> None:
    loop = make_loop({}, **config)
    loop.progress.step, loop.progress.epoch, loop.progress.samples = position
    assert loop.config.expected_steps(loop.progress, loop.feed) == total


def test_a_resumed_run_counts_its_own_steps(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    first = make_loop({})
    first.progress.load_state_dict({"step": 900, "position": 900, "epoch": 64, "samples": 512})
    state = Restores({name: part for name, part in first.state_dict().items() if name != "optimizers"})
    plugins = {"state": state, "bar": ProgressBar(), "clock": Clock(monkeypatch), "stop": StopAt(904)}
    make_loop(plugins, steps=1000).run()
    early, late = capsys.readouterr().err.splitlines()
    assert early.startswith("step 902/1,000 ")
    assert "  13 img/s  ETA 16:20  " in early  # 98 steps of ten seconds
    assert "  13 img/s  ETA 16:00  " in late


def test_the_eta_follows_max_time_if_it_ends_the_run_first(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    make_loop({"bar": ProgressBar(), "clock": Clock(monkeypatch)}, steps=1000, max_time="50 s").run()
    assert re.findall(r"ETA \S+ s", capsys.readouterr().err) == ["ETA 30 s", "ETA 10 s", "ETA 0 s"]
