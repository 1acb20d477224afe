import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Batch, Loop, LoopConfig, hookimpl
from hookdiff.data import digits
from hookdiff.structure import Problems, arguments
from hookdiff.testing import toy_loop
from hookdiff_debug import Debug
from hookdiff_ema import EMA
from hookdiff_gradients import GradientMonitor
from hookdiff_loss import LossMonitor
from hookdiff_memory import Memory
from hookdiff_progress import ProgressBar
from hookdiff_progress.plugin import clock, total_steps
from tests.conftest import Clock, Logged, Restores, StopAt, check_facts, wait_until, warnings


def loss(net: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = net(batch.inputs).square()
    return result


def make_loop(plugins: Mapping[str, object], **config: Any) -> Loop:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Loop(model, optimizer, loss, digits(), LoopConfig(**{"log_every": 2, **config}), plugins)


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


class Evaluation:
    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.log.due:
            loop.log({"lr": 0.125, "clip/share": 0.5})
        if loop.progress.step == 4:
            loop.log({"fd/digits": 12.3456})


def test_golden_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pipe(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "evaluation": Evaluation()}, steps=6).run()
    lines = output.text().splitlines()
    number = r"[-\d.e]+"
    shown = rf"loss {number}  lr 0\.125  grad_norm {number}"
    for line, step, more in zip(lines, (2, 4, 6), ("", r"  fd/digits 12\.35", ""), strict=True):
        assert re.fullmatch(rf"step {step}/6  {shown}  \d+ img/s  ETA [\d:]+{more}  clip/share 0\.5", line), line


def test_lines_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe(monkeypatch) as output:
        loop = make_loop({"bar": ProgressBar()}, steps=4)
        with loop:
            for step in loop.steps():
                if step.step == 3:
                    wait_until(lambda: b"step 2/4" in output.read)
    output.text()


def test_golden_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = sys.stderr
    with terminal(monkeypatch) as output:
        make_loop({"bar": ProgressBar(), "evaluation": Evaluation()}, steps=6).run()
    assert sys.stderr is stderr
    text = output.text()
    bar, values, *rest = screen(text)
    assert re.fullmatch(r"step 6/6 ━+ 100%  \d+ img/s  ETA 0:00", bar)
    assert len(bar) == 100
    assert re.fullmatch(r"loss \S+  lr 0.125  grad_norm \S+  fd/digits 12.35  clip/share 0.5", values)
    assert not any(rest)
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_logging_and_printing_do_not_break_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chatty:
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            logging.getLogger("hookdiff").warning("logged at %d", loop.progress.step)
            print("printed at", loop.progress.step, file=sys.stderr)
            clock.now += 10  # so that the bar is drawn again
            bar.before_step()

    clock, bar = Clock(monkeypatch), ProgressBar()
    with terminal(monkeypatch) as output:
        handler = logging.StreamHandler()  # made before the bar, as logging.basicConfig does
        stream = handler.stream
        monkeypatch.setattr(logging.getLogger("hookdiff"), "handlers", [handler])
        make_loop({"bar": bar, "chatty": Chatty()}, steps=3).run()
        assert handler.stream is stream
    lines = [line for line in screen(output.text()) if line]
    assert lines[:6] == [f"{verb} at {step}" for step in (1, 2, 3) for verb in ("logged", "printed")]
    assert lines[6].startswith("step 3/3 ")
    assert lines[7].startswith("loss ")
    assert len(lines) == 8


def test_an_error_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking:
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            raise RuntimeError("broken")

    with terminal(monkeypatch) as output:
        stderr = sys.stderr
        with pytest.raises(RuntimeError, match="broken"):
            make_loop({"bar": ProgressBar(), "breaking": Breaking()}, steps=3).run()
        assert sys.stderr is stderr
        print("Traceback", file=sys.stderr)
    lines = screen(output.text())
    assert lines[0].startswith("step 1/3 ")
    assert "Traceback" in lines


@pytest.mark.parametrize("columns", [20, 300])
def test_a_bar_of_any_width_keeps_to_two_lines(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns) as output:
        make_loop({"bar": ProgressBar(), "evaluation": Evaluation()}, steps=4).run()
    lines = [line for line in screen(output.text()) if line]
    assert len(lines) == 2
    assert max(map(len, lines)) <= columns


def test_other_ranks_show_nothing(second_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    make_loop({"bar": ProgressBar()}, steps=2).run()
    assert capsys.readouterr() == ("", "")


def test_the_number_of_values_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    class Layers:
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            loop.log({f"layer/{index}": 1.0 for index in range(100)})
            if loop.progress.step == 2:
                loop.log({"fd/digits": 2.0})

    make_loop({"bar": ProgressBar(), "layers": Layers()}, steps=2).run()
    line = capsys.readouterr().err.splitlines()[-1]
    assert "fd/digits 2  layer/0 1" in line
    assert 100 < len(line) <= 120
    assert line.endswith(" 1")  # a value is shown whole or not at all


def test_details_are_for_the_sinks_and_every_line_has_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    class Looks:
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            loop.log({"odd/inner": 1.0}, detail=True)
            if loop.progress.step == 3:
                loop.log({"fd/digits": 2.0})

    logged = Logged()
    with make_loop({"bar": ProgressBar(), "looks": Looks(), "logged": logged}, steps=5, log_every=4) as loop:
        losses = [step.loss for step in loop.steps()]
    third, fourth = capsys.readouterr().err.splitlines()
    assert third.startswith(f"step 3/5  loss {losses[2]:.4g}  ")
    assert third.endswith("  fd/digits 2")
    assert fourth.startswith(f"step 4/5  loss {sum(losses[:4]) / 4:.4g}  grad_norm ")
    assert list(logged.of("odd/inner").values()) == [1.0] * 5


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_values_of_an_epochs_end_bring_no_second_loss_of_its_step(
    on_a_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measures:
        @hookimpl
        def on_epoch_end(self, loop: Loop) -> None:
            loop.log({"val/mine": 3.0})

    with terminal(monkeypatch) if on_a_terminal else pipe(monkeypatch) as output:
        logged = Logged()
        plugins = {"bar": ProgressBar(), "measures": Measures(), "logged": logged}
        make_loop(plugins, epochs=1, batch_size=300, log_every=5).run()
    assert [step for step, _ in logged.calls] == [5, 5]
    shown = re.findall(r"(loss|val/mine) (\S+)", "\n".join(screen(output.text())))
    assert shown == [("loss", f"{logged.of('loss')[5]:.4g}"), ("val/mine", "3")]


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_a_broken_stderr_switches_it_off_with_a_line_in_the_log(
    on_a_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks:
        @hookimpl
        def before_step(self, loop: Loop) -> None:
            clock.now += 10  # so that the bar is drawn again
            if loop.progress.step == 2:
                os.close(reading)

    clock = Clock(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    reading, writing = pty.openpty() if on_a_terminal else os.pipe()
    stream = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    before = sys.stdout
    loop = make_loop({"breaks": Breaks(), "bar": ProgressBar(), "clock": clock}, steps=8, log_every=1)
    assert loop.run() == "done"
    assert (sys.stderr, sys.stdout) == (stream, before)
    assert loop.progress.step == 8
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
    loop = make_loop({"bar": ProgressBar()}, steps=4)
    loop.run()
    loop.run()  # a second run tries again
    monkeypatch.undo()
    assert capsys.readouterr().out == ""  # where print writes if there is no stderr
    assert loop.progress.step == 4
    assert 1 <= len(warnings(caplog)) <= 2
    for warning in warnings(caplog):
        check_facts(warning, "progress", "stderr")
    if file:
        with suppress(OSError):
            file.close()


def test_lines_of_a_run_with_every_monitor_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    monitors = {
        "ema": EMA(),
        "debug": Debug(),
        "loss": LossMonitor(),
        "gradients": GradientMonitor(),
        "memory": Memory(),
    }
    toy_loop({"bar": ProgressBar(), **monitors}, steps=20, log_every=10, micro_batch=4).run()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # none for the looks of debug
    for line, step in zip(lines, (10, 20), strict=True):
        assert re.match(rf"step {step}/20  loss \S+  grad_norm \S+  \d+ img/s  ETA \S+  ", line), line
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
    assert total_steps(loop) == total


def test_an_epoch_run_ends_at_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    make_loop({"bar": ProgressBar()}, epochs=2, log_every=14).run()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 14/28 ")
    assert last.startswith("step 28/28 ")


def test_a_resumed_run_counts_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_loop({})
    first.progress.load_state_dict({"step": 900, "position": 900, "epoch": 64, "samples": 512})
    state = Restores({name: part for name, part in first.state_dict().items() if name != "optimizers"})
    plugins = {"state": state, "bar": ProgressBar(), "clock": Clock(monkeypatch), "stop": StopAt(904)}
    make_loop(plugins, steps=1000).run()
    early, late = capsys.readouterr().err.splitlines()
    assert early.startswith("step 902/1000 ")
    assert early.endswith("  13 img/s  ETA 16:20")  # 98 steps of ten seconds
    assert late.endswith("  13 img/s  ETA 16:00")


def test_a_pause_does_not_count_as_training_in_the_eta(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pauses:
        """Takes 1000 seconds after each of these steps, as an evaluation does."""

        def __init__(self, *steps: int) -> None:
            self.steps = steps

        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            clock.now += 1000 * (loop.progress.step in self.steps)

    def etas(*steps: int) -> dict[int, int]:
        make_loop({"bar": ProgressBar(), "clock": clock, "pauses": Pauses(*steps)}, steps=100).run()
        found = [
            re.search(r"step (\d+)/.*ETA (?:(\d+):)?(\d+):(\d+)", line) for line in capsys.readouterr().err.splitlines()
        ]
        return {int(one[1]): int(one[2] or 0) * 3600 + int(one[3]) * 60 + int(one[4]) for one in found if one}

    clock = Clock(monkeypatch)
    assert etas() == {step: 10 * (100 - step) for step in range(2, 101, 2)}  # ten seconds for each step
    once = etas(20)
    assert len(once) == 50
    assert once == etas()
    often = etas(20, 40, 60, 80, 100)
    assert 800 < often[60] < 2400  # pauses that come again make a run longer: by 2000 seconds
    assert max(often[step + 2] - often[step] for step in range(60, 98, 2)) < 400  # seconds


def test_the_eta_follows_max_time_if_it_ends_the_run_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_loop({"bar": ProgressBar(), "clock": Clock(monkeypatch)}, steps=1000, max_time="50 s").run()
    assert [line.rpartition("  ")[2] for line in capsys.readouterr().err.splitlines()] == ["ETA 0:30", "ETA 0:10"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3600, "1:00:00"), (200000, "55:33:20")]
)
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_it_has_no_settings() -> None:
    problems = Problems()
    arguments(ProgressBar, {"width": 80}, "plugins.progress", problems)
    (problem,) = problems.found
    check_facts(problem, "plugins.progress.width")
