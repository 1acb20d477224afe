"""Follows the files of a run: each reading parses only the lines that were appended since the last reading."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from attrs import define, field

from hookdiff import UserError
from hookdiff.run_dir import (
    BEGINS,
    MOST_LINES,
    History,
    Logged,
    LoggedEvent,
    Tail,
    asked_number,
    follow_events,
    follow_metrics,
    is_distance,
    newest_picture,
    total_steps,
)

_NAMES = ("loss", "loss/smooth", "grad_norm", "lr")
_ROUTINE = ("checkpoint", "void", "skipped", "held")  # only the newest event of each is shown, with a count
_WINDOW, _FEWEST = 60.0, 10  # the speed is a mean over this many seconds, and over at least this many lines
_WAITING = ("running", "not started", "missing")


@define(eq=False)
class Followed:
    """A run directory. Its files may grow, be truncated, replaced or removed at any time."""

    run_dir: Path
    state: str = field(init=False, default="not started")  # the state of History, "not started" or "missing"
    message: str = field(init=False, default="")  # why the run has ended, or why its config cannot be read
    series: dict[str, dict[int, float]] = field(init=False, factory=dict)  # values by name and step
    notes: list[tuple[LoggedEvent, int]] = field(init=False, factory=list)  # events, each with its number
    picture: Path | None = field(init=False, default=None)  # the newest samples
    step: int = field(init=False, default=0)  # step of the newest line, or of the end
    _config: Mapping[str, Any] = field(init=False, factory=dict)
    _points: list[tuple[float, int]] = field(init=False, factory=list)  # time and step of each line
    _process: LoggedEvent | None = field(init=False, default=None)  # the event with which the newest process began
    _began: tuple[float, int] | None = field(init=False, default=None)  # time and step of the last start or rollback
    _metrics: Tail[Logged[float]] = field(init=False)
    _events: Tail[LoggedEvent] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._metrics = follow_metrics(self.run_dir, MOST_LINES)
        self._events = follow_events(self.run_dir)

    def read(self) -> None:
        """Read the new lines of all files; a damaged file raises no error."""
        history = History(self.run_dir)
        state, outcome = history.state, history.outcome  # read first, since the last lines come before the end of a run
        try:
            self._config, self.message = history.config, outcome.message
        except UserError as error:
            self._config, self.message = {}, str(error).removeprefix(f"{self.run_dir}{os.sep}")
        self._read_metrics()
        self._read_events()
        if state != "running":
            self.step = max(self.step, outcome.step)  # the last steps may have no logged line
        has_begun = self.series or self.step or self.notes or outcome.reason
        if not self.run_dir.is_dir():
            self.state = "missing"
        else:
            self.state = state if has_begun or state == "running" else "not started"
        self.picture = newest_picture(self.run_dir, "samples")

    def _read_metrics(self) -> None:
        anew, lines = self._metrics.read()
        if anew:
            self.series, self.step, self._points = {}, 0, []
        for line in lines:
            self.step = line.step
            if not math.isnan(line.time):
                self._points.append((line.time, line.step))
            for name, value in line.values.items():
                if name in _NAMES or is_distance(name):
                    self.series.setdefault(name, {})[line.step] = value

    def _read_events(self) -> None:
        anew, lines = self._events.read()
        if anew:
            self.notes, self._began, self._process = [], None, None
        for logged in lines:
            kind, number = logged.event.kind, 1
            if kind in BEGINS:
                self._process = logged
            if kind in (*BEGINS, "rollback"):
                self._began = logged.time, logged.step
            if kind in _ROUTINE:
                kinds = takewhile(_ROUTINE.__contains__, (note.event.kind for note, _ in reversed(self.notes)))
                if kind in (recent := list(kinds)):
                    number += self.notes.pop(-1 - recent.index(kind))[1]
            self.notes.append((logged, number))

    @property
    def names(self) -> list[str]:
        """The names of the values; the values of the training come first."""
        known = [name for name in _NAMES if name in self.series]
        return known + sorted(name for name in self.series if name not in _NAMES)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: done, stopped or crashed."""
        return self.state not in _WAITING

    @property
    def total(self) -> int | None:
        """The number of steps of the whole run, as far as it is known."""
        return total_steps(self._config, self._process)

    @property
    def batch_size(self) -> int | None:
        return asked_number(self._config, "batch_size")

    @property
    def age(self) -> float | None:
        """Seconds since the newest line was written."""
        return max(0.0, time.time() - self._points[-1][0]) if self._points else None

    @property
    def speed(self) -> float | None:
        """Steps per second, with the evaluations between them: the mean over the last lines of this process."""
        recent: list[tuple[float, int]] = []
        for point in reversed(self._points):
            if self._began and point[0] < self._began[0]:
                break
            recent.append(point)
            if len(recent) > _FEWEST and recent[0][0] - point[0] >= _WINDOW:
                break
        if len(recent) == 1 and self._began:
            recent.append(self._began)
        seconds, steps = (recent[0][k] - recent[-1][k] for k in (0, 1)) if recent else (0, 0)
        return steps / seconds if steps > 0 and 0 < seconds < math.inf else None

    @property
    def left(self) -> float | None:
        """Seconds until the last step at the speed `speed`."""
        if self.total is None or self.speed is None or self.age is None:
            return None
        return max(0.0, (self.total - self.step) / self.speed - self.age)
