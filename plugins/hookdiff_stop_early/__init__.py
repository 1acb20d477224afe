"""Ends a run when a logged value no longer improves."""

import math
from collections.abc import Mapping
from typing import Literal

from attrs import define, field
from attrs.validators import ge

from hookdiff import Finding, Loop, hookimpl, listed, nearest, saved
from hookdiff.machine import first_rank_says
from hookdiff.options import COUNT, about, numbers


@define(eq=False)
class StopEarly:
    """Ends the run when a logged value has not improved for several measurements.

    NaN is no improvement. A run that this plugin has ended ends again when it is resumed, unless `patience` is raised.
    """

    metric: str = field(default="val/loss", metadata=about("name of the logged value"))
    mode: Literal["min", "max"] = field(default="min", metadata=about('best value: "min" or "max"'))
    patience: int = field(default=10, validator=ge(1), metadata=about("measurements in a row without an improvement"))
    min_delta: float = field(default=0.0, validator=ge(0), metadata=about("least improvement that counts"))
    after: int = field(default=0, validator=ge(0), metadata=about("ignore earlier measurements", "steps"))
    _best: float = saved(validator=numbers(finite=False))  # best value times `_sign`, so that lower is better
    _best_at: int = saved(validator=COUNT)  # step of the best value
    _stale: int = saved(validator=COUNT)  # measurements since the best measurement
    _is_logged: bool = saved()  # whether the metric was logged at any step of the run
    _best_metric: str = saved(key="metric")  # the metric of the saved best value
    _best_mode: str = saved(key="mode")
    _names: set[str] = field(init=False)  # names of all logged values

    @hookimpl
    def on_start(self) -> None:
        self._names = set()
        self._begin()

    def _begin(self) -> None:
        self._best, self._best_at, self._stale, self._is_logged = math.inf, 0, 0, False
        self._best_metric, self._best_mode = self.metric, self.mode

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if (self._best_metric, self._best_mode) != (self.metric, self.mode):  # the config has a new metric or mode
            self._begin()
        loop.resources.callback(self._warn_if_unknown, loop)  # after the last values, which on_stop may log
        self._stop_if_due(loop)

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self._names.update(values)
        if self.metric not in values:
            return
        self._is_logged = True
        if step < self.after:
            return
        value = self._sign * values[self.metric]
        if value < self._best - self.min_delta:
            self._best, self._best_at, self._stale = value, step, 0
        else:
            self._stale += 1

    @hookimpl
    def between_steps(self, loop: Loop) -> None:
        self._stop_if_due(loop)

    @property
    def _sign(self) -> int:
        return 1 if self.mode == "min" else -1

    def _stop_if_due(self, loop: Loop) -> None:
        # Not called in on_log: a value may be logged only on the first rank, or differ between ranks.
        if first_rank_says(self._stale >= self.patience):
            best = f"its best is {self._sign * self._best:.4g}, of step {self._best_at:,}"
            if self._best == math.inf:
                best = "it was never finite"
            loop.stop("plugin", f"{self.metric} has not improved for {self._stale} measurements; {best}")

    def _warn_if_unknown(self, loop: Loop) -> None:
        if self._is_logged or loop.end.reason != "done":
            return
        near = nearest(self.metric, self._names)
        what = f"stop_early: {self.metric!r} was never logged, so it could not end the run{near}"
        why = f"logged are: {listed(sorted(self._names), 8) or 'no values'}"
        remedy = "the plugin loss with data.held_out, which logs val/loss"
        loop.log.report(Finding("warning", what, why, remedy))
