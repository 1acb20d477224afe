"""The logged values by which checkpoints are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field

from hookdiff import Finding, nearest
from hookdiff.findings import listed

_MOST = 8  # names that are listed


@define(eq=False)
class Logged:
    """The values of the newest step, and whether the one that decides on the best is logged at steps that are saved."""

    best: str | None  # its name
    is_found: bool = False  # at a step that was saved
    _step: int = field(default=0, init=False)
    _values: dict[str, float] = field(factory=dict, init=False)
    _names: set[str] = field(factory=set, init=False)  # of all that was logged
    _elsewhere: int | None = field(default=None, init=False)  # the newest step at which the best was logged

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take what is logged at `step`, which may come in parts."""
        self._values = {**(self._values if step == self._step else {}), **values}
        self._step = step
        self._names.update(values)
        if self.best in values:
            self._elsewhere = step

    def at(self, step: int) -> dict[str, float]:
        """Return the finite values of `step`, which is to be saved."""
        if step != self._step:
            return {}
        self.is_found |= self.best in self._values
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    def problem(self, is_over: bool) -> Finding | None:
        """Return why no checkpoint is the best; while the run goes on, only where that is likely to stay."""
        if self.best is None or self.is_found:
            return None
        near, so_far = nearest(self.best, self._names), "" if is_over else "so far "
        if self._elsewhere:
            what = (
                f"keep_best: {self.best!r} was logged at step {self._elsewhere} and {so_far}at no step that was saved"
            )
            remedy = "to save where it is logged (plugins.checkpoint.every)"
            return Finding("warning", what, "no checkpoint is kept for it", remedy)
        if not (is_over or near):
            return None
        what = f"keep_best: {self.best!r} has {so_far}not been logged, so no checkpoint is kept for it"
        names = listed(sorted(self._names), _MOST) or "no values"
        return Finding("warning", what + near, "" if near else f"logged are: {names}")
