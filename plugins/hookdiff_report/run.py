"""A run as a report sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from attrs import frozen
from numpy.typing import NDArray

from hookdiff import UserError, shown
from hookdiff.run_dir import BEGINS, SMOOTHED, History, asked_number, total_steps

Array = NDArray[numpy.float64]
_WINDOWS = 200  # windows of `Pace`
NEIGHBOURS = 100  # values in a mean, for the loss of a run without the plugin loss


@frozen(eq=False)
class Pace:
    """The speed of a training, per second: means over windows that end at `steps`, and over all of them."""

    steps: Array
    rates: Array
    mean: float
    unit: str  # "img/s" or "steps/s"
    size: float  # images of a step, or 1


@frozen(eq=False)
class ReportedRun:
    """A run and its name in the report."""

    history: History
    label: str  # differs from the labels of the other runs
    config: Mapping[str, Any]  # empty if it cannot be read
    problem: str  # why the config is empty

    @classmethod
    def of(cls, history: History, label: str) -> ReportedRun:
        """Return the run of `history`."""
        try:
            config, problem = history.config, "config.toml is empty"
        except UserError as error:
            config, problem = {}, shown(error)
        return cls(history, shown(label), config, "" if config else problem)

    @property
    def state(self) -> str:
        """Whether the run is running, done, stopped or crashed. A run that has written its outcome is over."""
        reason = self.history.outcome.reason
        if reason is None:
            return self.history.state
        return {"done": "done", "error": "crashed"}.get(reason, "stopped")

    @property
    def total(self) -> int | None:
        """The number of steps of the whole run, as far as it is known."""
        begins = (logged for logged in reversed(self.history.events) if logged.event.kind in BEGINS)
        return total_steps(self.config, next(begins, None))

    def points(self, name: str) -> tuple[Array, Array]:
        """Return steps and values of a logged name, by step; empty if there are none."""
        steps, values = numpy.array(self.history.series.get(name, ([], [])), float)
        return steps, values

    @property
    def loss(self) -> tuple[Array, Array]:
        """The smoothed loss by step: loss/smooth, or without the plugin loss a mean of neighbours."""
        if "loss/smooth" in self.history.series:
            return self.points("loss/smooth")
        steps, values = self.points("loss")
        return steps, _smooth(values)

    @property
    def newest_loss(self) -> float:
        """The smoothed loss at the end, as `hookdiff runs` shows it."""
        if "loss/smooth" in self.history.series:
            return float(self.points("loss/smooth")[1][-1])
        return float(self.points("loss")[1][-SMOOTHED:].mean())

    @property
    def seconds(self) -> float:
        """The sum of the times from each start or resume to the last line or event of its process."""
        times = numpy.array([*self.history.times[1], *(logged.time for logged in self.history.events)], float)
        process = self._process_at(times)
        return float(sum(numpy.ptp(times[process == k]) for k in numpy.unique(process)))

    def pace(self) -> Pace | None:
        """Return the speed of the training, from the times of the logged lines; None if the lines are too few.

        The time between two lines includes samples, evaluations and checkpoints. The time between two processes, and
        the time to the first line of each, are left out.
        """
        steps, times = numpy.array(self.history.times, float)
        process = self._process_at(times)
        is_edge = numpy.diff(process, prepend=-1, append=-1) != 0  # the first and the last line of each process
        is_window = numpy.arange(len(steps)) % max(1, len(steps) // _WINDOWS) == 0
        picked = is_window | is_edge[:-1] | is_edge[1:]
        step, time = numpy.diff(steps[picked]), numpy.diff(times[picked])
        good = (numpy.diff(process[picked]) == 0) & (step > 0) & (time > 0) & (time < 1e10)
        if not good.any():
            return None
        size = asked_number(self.config, "batch_size")
        step, time = step[good] * (size or 1), time[good]
        unit = "img/s" if size else "steps/s"
        return Pace(steps[picked][1:][good], step / time, float(step.sum() / time.sum()), unit, size or 1)

    def _process_at(self, times: Array) -> NDArray[numpy.intp]:
        """Return for each time the number of the process that was training; a process begins with a start or resume."""
        begins = sorted(logged.time for logged in self.history.events if logged.event.kind in BEGINS)
        return numpy.searchsorted(numpy.array(begins, float), times, side="right")


def named(histories: Sequence[History]) -> list[ReportedRun]:
    """Return the runs with their names, or with their paths where names are equal."""
    names = [history.name for history in histories]
    return [ReportedRun.of(each, each.name if names.count(each.name) == 1 else str(each.run_dir)) for each in histories]


def _smooth(values: Array) -> Array:
    """Return for each value the mean of up to NEIGHBOURS finite values around it, fewer for a short curve."""
    width = max(1, min(NEIGHBOURS, len(values) // 10)) // 2
    finite = numpy.isfinite(values)
    sums, nums = (numpy.cumsum([0, *part]) for part in (numpy.where(finite, values, 0.0), finite))
    low, high = (numpy.clip(numpy.arange(len(values)) + end, 0, len(values)) for end in (-width, width + 1))
    means: Array = (sums[high] - sums[low]) / (nums[high] - nums[low])
    return means
