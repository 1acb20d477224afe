"""What a report says about a run, without its curves: names, counts, times and the pace of the training."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy
from attrs import define
from numpy.typing import NDArray

from hookdiff import UserError
from hookdiff.history import History

Array = NDArray[numpy.float64]
_WINDOWS = 200  # of the pace
_BEGINS = ("start", "resume")  # events with which a process begins


@define(frozen=True, eq=False)
class Pace:
    """The speed of a training: means over windows of steps, and over all of them; per second."""

    steps: Array
    rates: Array
    mean: float
    unit: str  # "samples" or "steps"
    size: float  # of these in a step


@define(eq=False, frozen=True)
class Run:
    """A run as a report names it."""

    history: History
    label: str  # each run of a report has another

    @property
    def config(self) -> dict[str, Any]:
        """The config; empty if it cannot be read."""
        try:
            return self.history.config
        except UserError:
            return {}

    @property
    def problem(self) -> str:
        """Why the config cannot be read, if it cannot."""
        try:
            return "" if self.history.config else "config.toml is empty"
        except UserError as error:
            return str(error)

    @property
    def state(self) -> str:
        """Whether the run is running, done, stopped or crashed. A run that has written its outcome is over."""
        reason = self.history.outcome.get("reason")
        if reason is None:
            return self.history.state
        return {"done": "done", "error": "crashed"}.get(str(reason), "stopped")

    @property
    def message(self) -> str:
        """Why the run has ended, in its own words."""
        return str(self.history.outcome.get("message") or "")

    @property
    def total(self) -> float | None:
        """The number of steps that the config asks for."""
        return number_in(self.config, "run", "steps")

    def points(self, name: str) -> tuple[Array, Array]:
        """Return steps and values of a logged name, rising by step; empty if there are none."""
        steps, values = self.history.series.get(name, ([], []))
        x, y = numpy.array(steps, float), numpy.array(values, float)
        if (numpy.diff(x) <= 0).any():
            order = numpy.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return x, y

    def sessions(self) -> list[tuple[Array, Array]]:
        """Return the steps and times of what each process of this run has logged, oldest first."""
        steps, times = self.points("time")
        begins = sorted(logged.time for logged in self.history.events if logged.event.kind in _BEGINS)
        if not len(steps):
            return []
        number = numpy.searchsorted(numpy.array(begins), times, side="right")
        return [(steps[number == k], times[number == k]) for k in numpy.unique(number)]

    @property
    def seconds(self) -> float:
        """Time that the run has taken, from each start or resume to the last thing that was logged after it."""
        events = self.history.events
        times: list[float] = sorted([*self.points("time")[1].tolist(), *(logged.time for logged in events)])
        begins = sorted(logged.time for logged in events if logged.event.kind in _BEGINS) or times[:1]
        total = 0.0
        for begin, end in zip(begins, [*begins[1:], math.inf], strict=False):
            total += times[max(0, bisect_left(times, end) - 1)] - begin
        return max(0.0, total)

    def pace(self) -> Pace | None:
        """Return the speed of the training, from the times of the logged lines; None if they do not show it.

        The time between two lines includes samples, evaluations and checkpoints; the time between two processes and
        until the first line of each is left out.
        """
        size = number_in(self.config, "run", "batch_size")
        ends, steps, times = [numpy.zeros(0)], [numpy.zeros(0)], [numpy.zeros(0)]
        sessions = self.sessions()
        stride = max(1, sum(len(found) for found, _ in sessions) // _WINDOWS)
        for found, when in sessions:
            picked = [*range(0, len(found) - 1, stride), len(found) - 1]
            ends.append(found[picked][1:])
            steps.append(numpy.diff(found[picked]))
            times.append(numpy.diff(when[picked]))
        end, step, time = map(numpy.concatenate, (ends, steps, times))
        good = (time > 0) & (step > 0) & numpy.isfinite(step)
        if not good.any():
            return None
        end, step, time = end[good], step[good] * (size or 1), time[good]
        return Pace(end, step / time, float(step.sum() / time.sum()), "samples" if size else "steps", size or 1)


def named(histories: Sequence[History]) -> list[Run]:
    """Return the runs with their names, or with their paths where names are equal."""
    names = [history.name for history in histories]
    paths = [str(history.run_dir) for history in histories]
    labels = [path if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]
    return [Run(history, label) for history, label in zip(histories, labels, strict=True)]


def number_in(config: Mapping[str, Any], table: str, key: str) -> float | None:
    """Return a positive number of the config, or None."""
    found = config.get(table)
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value < 1e18 else None


# Numbers for people


def number(value: float) -> str:
    """Return a value with four digits."""
    return "not a number" if math.isnan(value) else f"{value:.4g}"


def count(value: float) -> str:
    """Return a count with its thousands."""
    return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}" if abs(value) < 1e300 else "very many"


def duration(seconds: float) -> str:
    """Return a time as "3 d 4 h", "4 h 5 min", "5 min 6 s" or "6 s"."""
    if not 0 <= seconds < 1e12:
        return "unknown"
    sizes = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest = round(seconds)
    parts: list[str] = []
    for unit, size in sizes:
        amount, rest = divmod(rest, size)
        if amount or parts or unit == "s":
            parts.append(f"{amount} {unit}")
    return " ".join(parts[:2])


def moment(time: float) -> str:
    """Return a time, in seconds since 1970, as date and minute of UTC."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "unknown"
