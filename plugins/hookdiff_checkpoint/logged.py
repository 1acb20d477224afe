"""The logged values that decide which checkpoint is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field

from hookdiff import Finding, nearest
from hookdiff.findings import listed


@define(eq=False)
class Logged:
    """The values of the newest step, and whether the value `best` is logged at steps that are saved."""

    best: str | None
    is_found: bool = False  # at a saved step
    _step: int = field(default=0, init=False)
    _values: dict[str, float] = field(factory=dict, init=False)
    _names: set[str] = field(factory=set, init=False)  # of all logged values
    _elsewhere: int | None = field(default=None, init=False)  # newest step at which `best` was logged

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values that are logged at `step`, which may have several logs."""
        self._values = {**(self._values if step == self._step else {}), **values}
        self._step = step
        self._names.update(values)
        if self.best in values:
            self._elsewhere = step

    def at(self, step: int) -> dict[str, float]:
        """Return the finite values of `step`, which is saved now."""
        if step != self._step:
            return {}
        self.is_found |= self.best in self._values
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    def problem(self, is_over: bool) -> Finding | None:
        """Return why no checkpoint is the best; before the run `is_over`, only if that is likely to stay so."""
        if self.best is None or self.is_found:
            return None
        near, so_far = nearest(self.best, self._names), "" if is_over else "so far "
        if self._elsewhere:
            what = f"keep_best: {self.best!r} was logged at step {self._elsewhere}, but {so_far}at no step with a save"
            remedy = "to save at the steps at which it is logged (plugins.checkpoint.every)"
            return Finding("warning", what, "no checkpoint is kept for it", remedy)
        if not (is_over or near):
            return None
        what = f"keep_best: {self.best!r} has {so_far}not been logged, so no checkpoint is kept for it"
        names = listed(sorted(self._names), 8) or "no values"
        return Finding("warning", what + near, "" if near else f"logged are: {names}")
