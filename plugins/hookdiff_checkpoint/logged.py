"""What was logged, as far as checkpoints are chosen by it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field

from hookdiff import nearest

_MOST = 8  # names that are told


@define(eq=False)
class Logged:
    """The values of the newest step, and whether the one that tells the best is ever logged where one saves."""

    best: str | None  # its name
    is_found: bool = False  # at a step that was saved
    _step: int = field(default=0, init=False)
    _values: dict[str, float] = field(factory=dict, init=False)
    _names: set[str] = field(factory=set, init=False)  # of all that was logged
    _elsewhere: int | None = field(default=None, init=False)  # the newest step at which the best was logged
    _is_told: bool = field(default=False, init=False)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take what is logged at `step`, which may be told in parts."""
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

    def problem(self, is_over: bool) -> str | None:
        """Return why no checkpoint is the best, only once, and while the run goes on where that is likely to stay."""
        if self.best is None or self.is_found or self._is_told:
            return None
        near = nearest(self.best, self._names)
        if not (is_over or near or self._elsewhere):
            return None
        self._is_told = True
        so_far = "" if is_over else "so far "
        if self._elsewhere:
            return (
                f"keep_best: {self.best!r} was logged at step {self._elsewhere} and {so_far}at no step that was saved, "
                "so no checkpoint is kept for it; save where it is logged (plugins.checkpoint.every)"
            )
        names = sorted(self._names)
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        known = near or f"; logged are: {', '.join(names[:_MOST]) or 'no values'}{more}"
        return f"keep_best: {self.best!r} has {so_far}not been logged, so no checkpoint is kept for it{known}"
