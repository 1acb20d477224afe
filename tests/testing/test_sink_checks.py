"""The promise of the author's kit that a tracker is a mirror of the run: each mistake of a sink gets its word."""

import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import define, field

from hookdiff import Loop, Sink, TrackedRun, hookimpl
from hookdiff.authors import Call, earlier
from hookdiff.testing.sink_checks import assert_tracks
from tests.conftest import refused


@define(eq=False)
class Right(Sink):
    """Writes lines to a file; the other sinks below each break one promise."""

    path: Path
    keeps: Callable[..., bool] = lambda sink, run: False  # whether `open` keeps the lines of the file
    fills: Callable[..., bool] = lambda sink, run: True  # whether `open` returns the earlier calls
    hides: tuple[type[Exception], ...] = ()  # errors that `WritesInAHook` hides
    was_open: bool = field(default=False, init=False)

    def open(self, run: TrackedRun) -> Sequence[Call] | None:
        if not self.keeps(self, run):
            self.path.write_text("")
        calls = earlier(run, self) if self.fills(self, run) else None
        self.was_open = True
        return calls

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{step} {name} {value}\n" for name, value in values.items())

    def close(self) -> None:
        self.path.open().close()


def read(path: Path) -> dict[tuple[int, str], float]:
    rows = [line.split() for line in (path / "lines").read_text().splitlines()]
    return {(int(step), name): float(value) for step, name, value in rows}


class LosesNan(Right):
    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        Right.scalars(self, step, time, {name: value for name, value in values.items() if not math.isnan(value)})


class RefusesNan(Right):
    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        Right.scalars(self, step, time, {name: int(value * 1000) / 1000 for name, value in values.items()})


class WritesInAHook(Right):
    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        with suppress(*self.hides):
            self.scalars(step, 0.0, values)


class WarnsItself(Right):
    def is_transient(self, error: Exception) -> bool:
        logging.getLogger("hookdiff").warning("WarnsItself: %s", error)
        return False


class Trains(Right):
    def check(self, loop: Loop) -> None:
        with torch.no_grad():
            next(loop.model.parameters()).mul_(0.5)


KEPT = ("only in the tracker", "earlier(run, self)")
LOST = ("only in metrics.jsonl", "earlier(run, self)")


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (Right, ()),
        (LosesNan, ("after a run", "test/nan after step 1", "only in metrics.jsonl", "NaN included")),
        (RefusesNan, ("in a run", "a call failed", "scalars", "ValueError")),
        (partial(Right, keeps=lambda sink, run: sink.was_open), ("after a rollback", "test/odd", *KEPT)),
        (
            partial(Right, keeps=lambda sink, run: run.step > 0 and not sink.was_open and not run.is_branch),
            ("after a kill and a resume", "test/odd", *KEPT),
        ),
        (
            partial(Right, fills=lambda sink, run: sink.was_open or run.is_branch),
            ("after a kill and a resume", "loss after step 1", *LOST),
        ),
        (partial(Right, fills=lambda sink, run: not run.is_branch), ("after a branch", "loss after step 1", *LOST)),
        (
            partial(Right, keeps=lambda sink, run: run.step == 0),
            ("after hookdiff mirror", "test/odd", "only in the tracker", "clear"),
        ),
        (WritesInAHook, ("when scalars raises OSError", "ends the run", "no hooks")),
        (partial(WritesInAHook, hides=(OSError,)), ("when scalars raises ValueError", "ends the run", "no hooks")),
        (partial(WritesInAHook, hides=(OSError, ValueError)), ("when scalars is locked", "ends the run", "no hooks")),
        (
            partial(WritesInAHook, hides=(OSError, ValueError, sqlite3.Error)),
            ("when scalars hangs", "waits for ever", "no hooks"),
        ),
        (WarnsItself, ("when open raises OSError", "one warning", "no warning of your own")),
        (Trains, ("when open raises OSError", "the weight", "change nothing")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and value else None,
)
def test_each_mistake_gets_its_word_and_a_right_sink_passes(
    kind: Callable[..., Sink], facts: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    def make(path: Path) -> Sink:
        return kind(path / "lines")

    name = type(make(Path())).__name__
    with refused(AssertionError, name, *facts) if facts else nullcontext():
        assert_tracks(make, read)
    assert capfd.readouterr() == ("", "")
    assert not any(thread.name == name for thread in threading.enumerate())


def test_what_is_no_sink_is_refused() -> None:
    with refused(TypeError, "make returned a PosixPath", "hookdiff.Sink"):
        assert_tracks(cast("Any", lambda path: path), read)
