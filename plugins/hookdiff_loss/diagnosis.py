"""Reads a loss curve: spike, drop, divergence, oscillation, plateau. Numbers go in, findings come out.

All is measured in logarithms, so that the scale of the loss means nothing, by medians and median deviations, so that a
few wild losses mean nothing, and against the noise of the curve itself, so that a noisy curve has no more findings
than a smooth one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from operator import mul
from statistics import fmean, median
from typing import Any, Literal

from attrs import asdict, define, field

from hookdiff import Alarms, Finding
from hookdiff.findings import rate_too_high

Kind = Literal["spike", "drop", "divergence", "recovery", "oscillation", "plateau"]

GROUP = 10  # updates of the short levels; an event that lasts twice as long is a new level
LEAST = math.log(1.5)  # of a spike or a drop that is reported
RISE = math.log(1.25)  # of a level
NARROWEST = 0.01  # deviation of a curve without noise: a percent
IN_A_ROW = 3  # levels above their limit before it is a divergence
START = math.log(1.2)  # above the first loss of all: by then a network has learnt something, or is being ruined
STARTING = 30  # short levels for which the first loss is remembered
MUCH_WORSE = 4.0  # times the level of a divergence that was reported: it is reported again
MARGIN = 4.0  # deviations of a level, beyond what the lowest of many is below their mean
FLAT = math.log(1.05)  # change within which a curve is flat

# Standard deviations of a normal distribution: over its median deviation; over that of a difference of two; of the
# median of n, over that of the mean.
OF_MAD, OF_DIFFERENCE, OF_MEDIAN = 1.4826, 1.4826 / math.sqrt(2), math.sqrt(math.pi / 2)


Findings = dict[Kind, Finding]  # `what` or `why` has the update at which it began


@define(eq=False)
class Levels:
    """Medians of the curve over groups of `size` updates, and whether they rise above the lowest of before."""

    size: int
    keep: int  # how many of them
    group: list[float] = field(init=False, factory=list)  # that is not whole yet
    values: list[float] = field(init=False, factory=list)
    num: int = field(init=False, default=0)  # of all so far
    lowest: float = field(init=False, default=math.inf)  # median of five levels in a row
    lowest_at: int = field(init=False, default=0)  # last update of them
    noise: float = field(init=False, default=math.inf)  # deviation of a level, as it was then
    risen: int = field(init=False, default=0)  # levels in a row that noise does not explain

    def add(self, value: float) -> list[float] | None:
        """Take in a value; return the group that it completes."""
        self.group.append(value)
        if len(self.group) < self.size:
            return None
        whole, self.group = self.group, []
        return whole

    def close(self, step: int, group: Sequence[float], noise: Callable[[], float]) -> None:
        """Take in a whole group that ends at `step`; `noise` tells the deviation of one value."""
        level = median(group)
        self.risen = self.risen + 1 if level - self.lowest > self.limit else 0
        self.num += 1
        self.values.append(level)
        if len(self.values) > self.keep:
            del self.values[0]
        low = median(self.values[-5:])
        if low < self.lowest:
            # Noise is remembered, too: a curve that runs away would excuse itself with the noise that it makes.
            self.lowest, self.lowest_at = low, step
            self.noise = max(OF_MEDIAN * noise() / math.sqrt(self.size), self._wander())

    @property
    def limit(self) -> float:
        """The rise that noise explains: the lowest of n normal numbers is about sqrt(2 ln n) deviations down."""
        return max(RISE, (MARGIN + math.sqrt(2 * math.log(max(2, self.num)))) * self.noise)

    def _wander(self) -> float:
        # Noise that is not independent shows in levels that are far apart; what they have in common is the trend.
        apart = [b - a for a, b in zip(self.values, self.values[5:], strict=False)]
        if len(apart) < 5:
            return 0.0
        common = median(apart)
        return OF_DIFFERENCE * median([abs(value - common) for value in apart])


@define(eq=False)
class Diagnosis:
    """Reads a loss curve one update at a time. A loss that is not above 0 has no logarithm, and ends it."""

    window: int = 100  # updates that tell what is usual
    spike: float = 10.0  # robust deviations from the median of the window
    plateau: int = 2000  # updates without a change; 0: never
    alarms: Alarms = field(factory=Alarms)  # with a state of its own
    num_spikes: int = field(init=False, default=0)  # that have ended
    _recent: list[float] = field(init=False, factory=list)  # logarithms of the window, without events
    _level: float = field(init=False, default=0.0)  # median of it
    _spread: float | None = field(init=False, default=None)  # deviation from it, once the window is full
    _event: list[float] = field(init=False, factory=list)  # what is far off, in a row
    _event_from: int = field(init=False, default=0)
    _short: Levels = field(init=False)
    _long: Levels = field(init=False)
    _by_long: bool = field(init=False, default=False)  # the levels by which it diverged
    _back_below: float = field(init=False, default=0.0)  # where a divergence is over
    _first: float | None = field(init=False, default=None)  # of all
    _above_first: int = field(init=False, default=0)  # short levels in a row
    _flat: float = field(init=False, default=math.inf)  # level of the plateau that was reported
    _ended: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._short, self._long = Levels(GROUP, 20), Levels(self.window, max(10, self.plateau // self.window))

    def observe(self, step: int, loss: float, worse_than_nothing: bool = False) -> Findings:
        """Take in the loss of update `step`; return what is news.

        `worse_than_nothing`: the error is larger than that of predicting nothing at all.
        """
        self._ended = self._ended or loss <= 0
        if self._ended:
            return {}
        value = math.log(loss)
        if self._first is None:
            self._first = value
        found = self._watch(step, value)
        for levels in (self._short, self._long):
            if group := levels.add(value):
                levels.close(step, group, self._noise)
                found |= self._rising(step, levels)
                if levels is self._short:
                    found |= self._ruined(step, worse_than_nothing)
                    self._look_back()
                else:
                    found |= self._swinging(step, group) | self._resting(step)
        return found

    def conclude(self, step: int) -> Findings:
        """Return what was under way when the run ended before its time."""
        if "divergence" in self.alarms:
            return {}
        if self._event and self._event[0] > self._level:
            return self._divergence(step, max(self._event), self._level, self._event_from - 1, LEAST)
        short = self._short
        level = median(short.group) if short.group else short.values[-1] if short.values else None
        if level is None or level - short.lowest < LEAST:
            return {}
        return self._divergence(step, level, short.lowest, short.lowest_at, LEAST)

    # Spikes and drops

    def _watch(self, step: int, value: float) -> Findings:
        found: Findings = {}
        if self._event:
            if self._is_off(value, self.spike / 2) and (value > self._level) == (self._event[0] > self._level):
                self._event.append(value)
                return self._event_stays() if len(self._event) == 2 * GROUP else {}
            found = self._event_over()
        elif self._is_off(value, self.spike) and self._is_abrupt(value):
            self._event, self._event_from = [value], step
            return {}
        self._recent.append(value)
        if len(self._recent) > self.window:
            del self._recent[0]
        return found

    def _is_off(self, value: float, deviations: float) -> bool:
        return self._spread is not None and abs(value - self._level) > max(LEAST, deviations * self._spread)

    def _is_abrupt(self, value: float) -> bool:
        # Not one that the window has seen the like of, nor the next of a slope.
        if min(self._recent) <= value <= max(self._recent):
            return False
        return min(abs(value - before) for before in self._recent[-5:]) > abs(value - self._level) / 2

    def _event_over(self) -> Findings:
        event, self._event = self._event, []
        # The window has seen it now: another that is no higher is not reported.
        self._recent = [*self._recent, *event][-self.window :]
        if event[0] < self._level:
            return {}  # a batch that was easy
        self.num_spikes += 1
        if self.num_spikes & (self.num_spikes - 1):
            return {}  # a run may have hundreds: only the first, second, fourth, eighth are reported
        assert self._spread is not None
        peak, lasted = max(event), len(event)
        why = f"{math.exp(peak):.3g}, {math.exp(peak - self._level):.3g} times its median and "
        why += f"{(peak - self._level) / self._spread:.0f} deviations above it, for {lasted} update" + "s" * (
            lasted > 1
        )
        why += f"; spike {self.num_spikes} of this run, from odd samples or a learning rate near its limit"
        what = f"the loss spikes at step {self._event_from} and comes back"
        return {"spike": Finding("warning", what, why, "the plugin clip, which makes spikes smaller")}

    def _event_stays(self) -> Findings:
        event, self._event = self._event, []
        before, now = self._level, median(event)
        self._recent, self._spread = event, None  # a new level; a window of it is to be seen first
        if now > before or "divergence" in self.alarms:
            return {}  # the levels show it
        if event[0] - before > 0.7 * (now - before):
            return {}  # it did not fall at once: the network learns fast
        what = f"the loss drops at step {self._event_from} and stays"
        why = f"{math.exp(now):.3g}, {math.exp(before):.3g} before; that is seldom learning"
        return {"drop": Finding("warning", what, why, "a look at the data from that step on: repeated, or blank?")}

    def _look_back(self) -> None:
        if len(self._recent) == self.window:
            self._level = level = median(self._recent)
            self._spread = max(NARROWEST, OF_MAD * median([abs(value - level) for value in self._recent]))

    # Levels

    def _noise(self) -> float:
        # Of differences, which a trend does not touch.
        if len(self._recent) < 2:
            return math.inf
        return max(NARROWEST, OF_DIFFERENCE * median([abs(b - a) for a, b in pairwise(self._recent)]))

    def _rising(self, step: int, levels: Levels) -> Findings:
        level, by_long = levels.values[-1], levels is self._long
        if levels.risen >= IN_A_ROW and (
            found := self._divergence(step, level, levels.lowest, levels.lowest_at, levels.limit / 2, by_long)
        ):
            return found
        calm = max(levels.values[-IN_A_ROW:]) < self._back_below
        if "divergence" in self.alarms and by_long == self._by_long and calm:
            self.alarms.news(step, "divergence", None)
            self._long.risen = 0
            return {"recovery": Finding("info", "the loss has come back", f"{math.exp(level):.3g} at step {step}")}
        return {}

    def _ruined(self, step: int, worse_than_nothing: bool) -> Findings:
        # A rate that is much too high may spoil a network before there is a level to rise from.
        level, num = self._short.values[-1], self._short.num
        assert self._first is not None
        self._above_first = self._above_first + 1 if level - self._first > START else 0
        if "divergence" in self.alarms or num > STARTING or self._above_first < IN_A_ROW:
            return {}
        rise = min(self._short.values[-IN_A_ROW:]) - self._first
        # One loss is little to go by: it must be the lowest of all, and far from them.
        alone = min(self._recent[1:]) > self._first and rise > max(math.log(2), MARGIN * self._noise())
        if not worse_than_nothing and not alone:
            return {}
        return self._divergence(step, level, self._first, 1, START)

    def _divergence(
        self, step: int, level: float, before: float, before_at: int, slack: float, by_long: bool = False
    ) -> Findings:
        now, ratio = math.exp(level), math.exp(level - before)
        finding = rate_too_high(
            f"the loss diverges: {now:.3g} at step {step}, {ratio:.3g} times the {math.exp(before):.3g} of step "
            f"{before_at}, which was still good"
        )
        if not self.alarms.news(step, "divergence", finding, size=now, growth=MUCH_WORSE):
            return {}
        self._back_below, self._by_long = before + slack, by_long
        return {"divergence": finding}

    def _resting(self, step: int) -> Findings:
        levels, num = self._long.values, self.plateau // self.window
        may_rest = self.plateau and "divergence" not in self.alarms and len(levels) >= num
        change, spread = trend(levels[-num:]) if may_rest else (math.inf, 0.0)
        level, over = median(levels[-num:]), levels[-1] < self._flat - FLAT
        what = f"the loss is flat since step {step - num * self.window}"
        why = f"{math.exp(level):.3g}, {change:+.1%} ± {2 * spread:.1%} in all: converged at this learning rate"
        finding = Finding("info", what, why, "to judge by samples or a distance, which get better long after")
        is_flat = abs(change) + 2 * spread <= FLAT
        if not self.alarms.news(step, "plateau", finding if is_flat else None, over=over):
            return {}
        self._flat = level
        return {"plateau": finding}

    def _swinging(self, step: int, group: Sequence[float]) -> Findings:
        found = period(group)
        updates, swing = found or (0, 0.0)
        why = f"by ±{swing:.0%}, once in {updates} updates: at the edge of stability, or data that repeats"
        what = f"the loss oscillates since step {step - len(group)}"
        finding = Finding("warning", what, why, "a third of the learning rate")
        return {"oscillation": finding} if self.alarms.news(step, "oscillation", finding if found else None) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that was seen, as plain values."""
        return asdict(self, filter=lambda attribute, _: not attribute.init)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        for name, value in deepcopy(dict(state)).items():
            if isinstance(value, Mapping):
                for inner, saved in value.items():
                    setattr(getattr(self, name), inner, saved)
            else:
                setattr(self, name, value)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Return how far the straight line of least squares goes over at least three `values`, and its standard error."""
    num = len(values)
    places = [index - (num - 1) / 2 for index in range(num)]
    squares = sum(place * place for place in places)
    slope, middle = sum(p * v for p, v in zip(places, values, strict=True)) / squares, fmean(values)
    left = sum((v - middle - slope * p) ** 2 for p, v in zip(places, values, strict=True))
    return slope * (num - 1), math.sqrt(left / (num - 2) / squares) * (num - 1)


def period(values: Sequence[float]) -> tuple[int, float] | None:
    """Return the period and the amplitude of a regular swing, or None.

    By the autocorrelation r of what the line of `trend` leaves: it must come back above 0.5 at a whole period, after
    it was below -0.4. That of noise is within 2 / sqrt(n) of 0. At least four periods must be there to see.
    """
    num = len(values)
    change, _ = trend(values)
    middle = fmean(values)
    rest = [value - middle - change * (index / (num - 1) - 0.5) for index, value in enumerate(values)]
    power = sum(value * value for value in rest)
    swing = math.sqrt(2 * power / num)
    if swing < FLAT:
        return None
    r = [sum(map(mul, rest, rest[lag:])) / power for lag in range(1, num // 4 + 1)]
    best = max(range(1, len(r)), key=r.__getitem__)
    return (best + 1, swing) if r[best] > 0.5 and min(r[:best]) < -0.4 else None
