"""A run as a report sees it. Its files are not trusted: steps that no run reaches are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from attrs import frozen
from numpy.typing import NDArray

from hookdiff import UserError
from hookdiff.errors import shown
from hookdiff.history import BEGINS, History, LoggedEvent, total_steps

Array = NDArray[numpy.float64]
_MOST_STEPS = 10**15
_WINDOWS = 200  # of the pace


@frozen(eq=False)
class Pace:
    """The speed of a training, per second: means over windows that end at `steps`, and over all of them."""

    steps: Array
    rates: Array
    mean: float
    unit: str  # "samples" or "steps"
    size: float  # of these in a step


@frozen(eq=False)
class Run:
    """A run and its name in the report."""

    history: History
    label: str  # each run of a report has another
    config: Mapping[str, Any]  # empty if it cannot be read
    problem: str  # why the config is empty

    @classmethod
    def of(cls, history: History, label: str) -> Run:
        """Return the run of `history`."""
        try:
            config, problem = history.config, "config.toml is empty"
        except UserError as error:
            config, problem = {}, shown(error)
        return cls(history, shown(label), config, "" if config else problem)

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
    def step(self) -> int:
        """The last step that is known."""
        return min(self.history.step, _MOST_STEPS)

    @property
    def total(self) -> int | None:
        """The number of steps of the whole run, as far as it is known."""
        begins = (logged for logged in reversed(self.history.events) if logged.event.kind in BEGINS)
        return total_steps(self.config, next(begins, None))

    @property
    def events(self) -> list[LoggedEvent]:
        """The events, oldest first."""
        return [logged for logged in self.history.events if abs(logged.step) < _MOST_STEPS]

    def points(self, name: str) -> tuple[Array, Array]:
        """Return steps and values of a logged name, by step; empty if there are none."""
        steps, values = numpy.array(self.history.series.get(name, ([], [])), float)
        is_step = abs(steps) < _MOST_STEPS
        return steps[is_step], values[is_step]

    @property
    def seconds(self) -> float:
        """Time that the run has taken, from each start or resume to the last thing that was logged after it."""
        times = numpy.array([*self.points("time")[1], *(logged.time for logged in self.events)], float)
        process = self._process_at(times)
        return float(sum(numpy.ptp(times[process == k]) for k in numpy.unique(process)))

    def pace(self) -> Pace | None:
        """Return the speed of the training, from the times of the logged lines; None if they do not show it.

        The time between two lines includes samples, evaluations and checkpoints; the time between two processes and
        until the first line of each is left out.
        """
        steps, times = self.points("time")
        process = self._process_at(times)
        is_edge = numpy.diff(process, prepend=-1, append=-1) != 0  # the first and the last line of each process
        is_window = numpy.arange(len(steps)) % max(1, len(steps) // _WINDOWS) == 0
        picked = is_window | is_edge[:-1] | is_edge[1:]
        step, time = numpy.diff(steps[picked]), numpy.diff(times[picked])
        good = (numpy.diff(process[picked]) == 0) & (step > 0) & (time > 0) & (time < 1e10)
        if not good.any():
            return None
        size = self._asked("batch_size")
        step, time = step[good] * (size or 1), time[good]
        unit = "samples" if size else "steps"
        return Pace(steps[picked][1:][good], step / time, float(step.sum() / time.sum()), unit, size or 1)

    def _process_at(self, times: Array) -> NDArray[numpy.intp]:
        """Return for each time the number of the process that was training; processes begin with these events."""
        begins = sorted(logged.time for logged in self.events if logged.event.kind in BEGINS)
        return numpy.searchsorted(numpy.array(begins, float), times, side="right")

    def _asked(self, key: str) -> float | None:
        """Return a positive number of the table "run" of the config, or None."""
        table = self.config.get("run")
        value = table.get(key) if isinstance(table, dict) else None
        return float(value) if isinstance(value, int | float) and 0 < value < _MOST_STEPS else None


def named(histories: Sequence[History]) -> list[Run]:
    """Return the runs with their names, or with their paths where names are equal."""
    names = [history.name for history in histories]
    return [Run.of(one, one.name if names.count(one.name) == 1 else str(one.run_dir)) for one in histories]
