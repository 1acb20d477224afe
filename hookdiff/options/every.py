"""Intervals in steps, epochs or seconds, at which a plugin acts."""

from __future__ import annotations

import math
import re
import time

from attrs import Attribute, define, field

from hookdiff.machine.ranks import first_rank_says

UNITS = {"step": 1, "steps": 1, "epoch": 1, "epochs": 1, "s": 1, "sec": 1, "min": 60, "h": 3600}
_SUFFIXES = {"steps": "", "epochs": " epochs", "seconds": " s"}


@define(frozen=True)
class Every:
    """An interval in steps, epochs or seconds; an amount of 0 means never. `parse_every` reads one from a config."""

    amount: float
    unit: str = "steps"  # steps, epochs or seconds

    def __str__(self) -> str:
        amount = int(self.amount) if float(self.amount).is_integer() else self.amount
        return f"{amount}{_SUFFIXES[self.unit]}"

    def after_step(self, step: int) -> bool:
        """Return whether to act after update number `step` (1 is the first)."""
        return self.unit == "steps" and self.amount > 0 and step % int(self.amount) == 0

    def after_epoch(self, epoch: int) -> bool:
        """Return whether to act when `epoch` epochs are complete."""
        return self.unit == "epochs" and self.amount > 0 and epoch % int(self.amount) == 0


def parse_every(value: int | str | Every) -> Every:
    """Read `500`, `"500"`, `"2 epochs"` or `"15 min"`; units: step(s), epoch(s), s, sec, min, h.

    Raises:
        ValueError: for any other value.
    """
    if isinstance(value, Every):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([a-z]*)\s*", str(value))
    unit = (match[2] or "steps") if match else ""
    amount = float(match[1]) * UNITS.get(unit, math.inf) if match else math.inf
    if not match or isinstance(value, (bool, float)) or not math.isfinite(amount):
        raise ValueError(f"expected steps (500), epochs ('2 epochs') or time ('15 min'), got {value!r:.200}")
    kind = "steps" if unit.startswith("step") else "epochs" if unit.startswith("epoch") else "seconds"
    if not amount.is_integer() and kind != "seconds":
        raise ValueError(f"expected a whole number of {kind}, got {value!r}")
    return Every(amount, kind)


@define
class Due:
    """An `Every` with a clock for intervals in seconds; with several ranks, the clock of the first rank decides."""

    every: Every = field(converter=parse_every)
    _since: float = field(factory=time.monotonic)

    def after_step(self, step: int) -> bool:
        """Return whether to act after update number `step`; if True, the clock starts over.

        All ranks must call this: with an interval in seconds they wait for the first rank.
        """
        if self.every.unit != "seconds" or not self.every.amount:
            return self.every.after_step(step)
        if not first_rank_says(time.monotonic() - self._since >= self.every.amount):
            return False
        self._since = time.monotonic()
        return True

    def after_epoch(self, epoch: int) -> bool:
        """Return whether to act when `epoch` epochs are complete."""
        return self.every.after_epoch(epoch)


def is_time(instance: object, attribute: Attribute[Every], value: Every) -> None:
    """Check that an `Every` is a time or 0, as an attrs validator."""
    if value.amount and value.unit != "seconds":
        raise ValueError(f"{attribute.name} must be a time, such as '30 min' or '3 h'")
