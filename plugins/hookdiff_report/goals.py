"""Goals: values that logged names should reach, and the steps at which they do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy
from attrs import frozen

from hookdiff import UserError, nearest, shown
from hookdiff_report.run import Array, ReportedRun
from hookdiff_report.words import count

_FEWEST = 3  # values that a guess needs
_FARTHEST = 20  # a guessed step is at most this many times the steps so far


@frozen
class Goal:
    """A value that a logged name should reach: from above, or from below if its first value is lower."""

    name: str
    value: float

    @classmethod
    def of(cls, text: str) -> Goal:
        """Return the goal of a text, such as "fd/digits=0.4"; raises ValueError."""
        name, _, value = text.rpartition("=")
        try:
            goal = cls(name.strip(), float(value))
        except ValueError:
            goal = cls("", math.nan)
        if not goal.name or not math.isfinite(goal.value):
            raise ValueError(f"{shown(text)}: write a logged name and a number as NAME=X, such as fd/digits=0.4")
        return goal

    def outlook(self, run: ReportedRun) -> str:
        """Return the step at which the values reach the goal, in words: a known step, a guess, or "not in sight".

        For the loss, the smoothed values count. The guess continues the last half of the values as a power of the step:
        log(value) is linear in log(step).
        """
        steps, values = run.loss if self.name == "loss" else run.points(self.name)
        is_finite = numpy.isfinite(values)
        steps, values = steps[is_finite], values[is_finite]
        if not len(values):
            return "nothing is measured yet"
        is_past = values <= self.value if values[0] >= self.value else values >= self.value
        if is_past.any():
            return f"reached at step {count(steps[is_past.argmax()])}"
        at = self._expected(steps, values)
        return "not in sight" if at is None else f"expected at about step {count(float(f'{at:.2g}'))}"

    def _expected(self, steps: Array, values: Array) -> float | None:
        half = max(_FEWEST, len(values) // 2)
        x, y = steps[-half:], values[-half:]
        if len(x) < _FEWEST or min(x.min(), y.min(), self.value) <= 0 or x.min() == x.max():
            return None
        slope, begin = numpy.polyfit(numpy.log(x), numpy.log(y), 1)
        if not slope:
            return None
        away = (math.log(self.value) - begin) / slope - math.log(x[-1])  # log of the goal's step over the last step
        return float(x[-1] * math.exp(away)) if 0 < away < math.log(_FARTHEST) else None


def check_goals(goals: Iterable[Goal], runs: Sequence[ReportedRun]) -> None:
    """Raise UserError unless each goal is about a name that a run has logged."""
    known = sorted({name for run in runs for name in run.history.series})
    for goal in goals:
        if known and goal.name not in known:
            raise UserError(f"--goal {shown(goal.name)}: no run has logged this name{nearest(goal.name, known)}")


def goals_in_config(run: ReportedRun) -> list[Goal]:
    """Return the goals in the table [plugins.report] of the config, as far as their names are logged."""
    texts: Any = run.config
    for key in ("plugins", "report", "goals"):
        texts = texts.get(key) if isinstance(texts, Mapping) else None
    goals = []
    for text in texts if isinstance(texts, list) else ():
        with suppress(ValueError):  # an edited config
            goals.append(Goal.of(str(text)))
    return [goal for goal in goals if goal.name in run.history.series]
