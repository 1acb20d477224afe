"""The promise of the author's kit that a tracker is a mirror of the run: each mistake of a sink gets its word."""

import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from attrs import define, field

from hookdiff import Loop, Sink, TrackedRun, hookimpl
from hookdiff.authors import Call, earlier
from hookdiff.testing.sink_checks import assert_tracks
from tests.conftest import refused


@define(eq=False)
class Right(Sink):
    """Writes lines to a file; the others each break one thing of it."""

    path: Path
    was_open: bool = field(default=False, init=False)

    def open(self, run: TrackedRun) -> Sequence[Call] | None:
        if not self.keeps(run):
            self.path.write_text("")
        calls = earlier(run, self) if self.fills(run) else None
        self.was_open = True
        return calls

    def keeps(self, run: TrackedRun) -> bool:
        return False

    def fills(self, run: TrackedRun) -> bool:
        return True

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


class KeepsLinesOfARollback(Right):
    def keeps(self, run: TrackedRun) -> bool:
        return self.was_open


class KeepsLaterLines(Right):
    def keeps(self, run: TrackedRun) -> bool:
        return run.step > 0 and not self.was_open and not run.is_branch


class LosesEarlierLines(Right):
    def fills(self, run: TrackedRun) -> bool:
        return self.was_open or run.is_branch


class BeginsABranchEmpty(Right):
    def fills(self, run: TrackedRun) -> bool:
        return not run.is_branch


class AddsAMirror(Right):
    def keeps(self, run: TrackedRun) -> bool:
        return run.step == 0


class WritesInAHook(Right):
    hidden: ClassVar[tuple[type[Exception], ...]] = ()

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        with suppress(*self.hidden):
            self.scalars(step, 0.0, values)


class HidesOsErrors(WritesInAHook):
    hidden = (OSError,)


class HidesValueErrors(WritesInAHook):
    hidden = (OSError, ValueError)


class HidesLocks(WritesInAHook):
    hidden = (OSError, ValueError, sqlite3.Error)


class WarnsItself(Right):
    def is_transient(self, error: Exception) -> bool:
        logging.getLogger("hookdiff").warning("WarnsItself: %s", error)
        return False


class Trains(Right):
    def check(self, loop: Loop) -> None:
        with torch.no_grad():
            next(loop.model.parameters()).mul_(0.5)


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (Right, ()),
        (LosesNan, ("after a run", "test/nan after step 1", "only in metrics.jsonl", "NaN included")),
        (RefusesNan, ("in a run", "a call failed", "scalars", "ValueError")),
        (KeepsLinesOfARollback, ("after a rollback", "test/odd", "only in the tracker", "earlier(run, self)")),
        (KeepsLaterLines, ("after a kill and a resume", "test/odd", "only in the tracker", "earlier(run, self)")),
        (
            LosesEarlierLines,
            ("after a kill and a resume", "loss after step 1", "only in metrics.jsonl", "earlier(run, self)"),
        ),
        (BeginsABranchEmpty, ("after a branch", "loss after step 1", "only in metrics.jsonl", "earlier(run, self)")),
        (AddsAMirror, ("after hookdiff mirror", "test/odd", "only in the tracker", "clear")),
        (WritesInAHook, ("when scalars raises OSError", "ends the run", "no hooks")),
        (HidesOsErrors, ("when scalars raises ValueError", "ends the run", "no hooks")),
        (HidesValueErrors, ("when scalars is locked", "ends the run", "no hooks")),
        (HidesLocks, ("when scalars hangs", "waits for ever", "no hooks")),
        (WarnsItself, ("when open raises OSError", "one warning", "no warning of your own")),
        (Trains, ("when open raises OSError", "the weight", "change nothing")),
    ],
)
def test_each_mistake_gets_its_word_and_a_right_sink_passes(
    kind: Callable[..., Any], facts: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    def make(path: Path) -> Any:
        return kind(path / "lines")

    with refused(AssertionError, kind.__name__, *facts) if facts else nullcontext():
        assert_tracks(make, read)
    assert capfd.readouterr() == ("", "")
    assert not any(thread.name == kind.__name__ for thread in threading.enumerate())


def test_what_is_no_sink_is_refused() -> None:
    with refused(TypeError, "make returned a PosixPath", "hookdiff.Sink"):
        assert_tracks(cast("Any", lambda path: path), read)
