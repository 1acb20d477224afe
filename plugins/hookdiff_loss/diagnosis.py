"""Finds spikes, drops, divergences, oscillations and plateaus in a loss curve.

Losses are compared by their logarithms, so that their scale has no effect. Medians and median deviations keep a few
outliers from counting. Limits are relative to the noise of the curve, so that a noisy curve has no more findings.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import mul
from statistics import fmean, median
from typing import Literal

from attrs import define, field

from hookdiff import Alarms, Finding, saved
from hookdiff.log import rate_too_high
from hookdiff.options import COUNT, numbers

Kind = Literal["spike", "drop", "divergence", "recovery", "oscillation", "plateau"]

GROUP = 10  # updates in a short level (see `Levels`); an event that lasts twice as long is a new level
LEAST = math.log(1.5)  # smallest spike or drop that is reported
RISE = math.log(1.25)  # a level that rises by less does not count
NARROWEST = 0.01  # smallest deviation that is assumed for a curve, one percent
IN_A_ROW = 3  # levels in a row above the limit that make a divergence
START = math.log(1.2)  # smallest rise above the first loss of the run that counts
STARTING = 30  # short levels for which the first loss is remembered
MUCH_WORSE = 4.0  # report a divergence again above this multiple of its reported level
MARGIN = 4.0  # deviations by which a rise must exceed the rise that noise explains
FLAT = math.log(1.05)  # change within which a curve is flat

# Of a normal distribution: the standard deviation over the median deviation; the same for a difference of two numbers;
# the standard deviation of the median of n numbers over that of their mean.
OF_MAD, OF_DIFFERENCE, OF_MEDIAN = 1.4826, 1.4826 / math.sqrt(2), math.sqrt(math.pi / 2)


Findings = dict[Kind, Finding]  # the text `what` or `why` has the step at which the event began


@define(eq=False)
class Levels:
    """Keeps the medians (levels) of groups of `size` updates, and counts levels that rise above the lowest one."""

    size: int
    keep: int  # number of levels
    group: list[float] = saved(factory=list, validator=numbers())  # values of the group that is not complete yet
    values: list[float] = saved(factory=list, validator=numbers())  # the last levels
    num: int = saved(0, validator=COUNT)  # levels so far
    lowest: float = saved(math.inf, validator=numbers(finite=False))  # lowest median of five levels in a row
    lowest_at: int = saved(0, validator=COUNT)  # last update of these five levels
    noise: float = saved(math.inf, validator=numbers(least=0, finite=False))  # deviation of a level at `lowest_at`
    risen: int = saved(0, validator=COUNT)  # levels in a row that have risen more than noise explains

    def add(self, step: int, value: float, noise: Callable[[], float]) -> list[float]:
        """Add the value of update `step`; return the group that it completes, else an empty list.

        `noise` returns the deviation of one value.
        """
        self.group.append(value)
        if len(self.group) < self.size:
            return []
        group, self.group = self.group, []
        level = median(group)
        self.risen = self.risen + 1 if level - self.lowest > self.limit else 0
        self.num += 1
        self.values.append(level)
        if len(self.values) > self.keep:
            del self.values[0]
        low = median(self.values[-5:])
        if low < self.lowest:
            # Keep the noise of this moment: a curve that diverges becomes so noisy that noise would explain the rise.
            self.lowest, self.lowest_at = low, step
            self.noise = max(OF_MEDIAN * noise() / math.sqrt(self.size), self._wander())
        return group

    @property
    def limit(self) -> float:
        """The rise that noise explains: the lowest of n normal numbers is about sqrt(2 ln n) deviations low."""
        return max(RISE, (MARGIN + math.sqrt(2 * math.log(max(2, self.num)))) * self.noise)

    def _wander(self) -> float:
        # Correlated noise shows in levels that are far apart; the median of their differences is the trend.
        apart = [b - a for a, b in zip(self.values, self.values[5:], strict=False)]
        if len(apart) < 5:
            return 0.0
        common = median(apart)
        return OF_DIFFERENCE * median([abs(value - common) for value in apart])


@define(eq=False)
class LossTrends:
    """Finds events and trends in a sequence of losses. It stops at a loss of 0 or less, which has no logarithm."""

    window: int = 100  # past updates with which a loss is compared
    spike: float = 10.0  # robust deviations from the median of the window
    plateau: int = 2000  # updates without a change that are reported; 0: none are
    alarms: Alarms = field(factory=Alarms)  # the plugin saves its state
    num_spikes: int = saved(0, validator=COUNT)  # spikes that have ended
    _recent: list[float] = saved(factory=list, validator=numbers())  # logarithms of the window, without events
    _level: float = saved(0.0, validator=numbers())  # median of the window
    _spread: float | None = saved(None, validator=numbers(least=0))  # deviation from it, once the window is full
    _event: list[float] = saved(factory=list, validator=numbers())  # consecutive values far from the median
    _event_from: int = saved(0, validator=COUNT)
    _short: Levels = saved()
    _long: Levels = saved()
    _by_long: bool = saved(False)  # the long levels showed the divergence
    _swing: float = saved(0.0, validator=numbers())  # size of the oscillation of the last long level, over the loss
    _back_below: float = saved(0.0, validator=numbers())  # level at which a divergence is over
    _first: float | None = saved(None, validator=numbers())  # logarithm of the first loss
    _above_first: int = saved(0, validator=COUNT)  # short levels in a row above the first loss
    _ruin: float | None = saved(None, validator=numbers())  # newest level, after `IN_A_ROW` above the first loss
    _ruin_at: int = saved(0, validator=COUNT)
    _flat: float = saved(math.inf, validator=numbers(finite=False))  # level of the plateau that was reported
    _ended: bool = saved(False)

    def __attrs_post_init__(self) -> None:
        self._short, self._long = Levels(GROUP, 20), Levels(self.window, max(10, self.plateau // self.window))

    def observe(self, step: int, loss: float, worse_than_nothing: bool = False) -> Findings:
        """Add the loss of update `step`; return the new findings.

        `worse_than_nothing`: the error before the last log was larger than that of a constant prediction.
        """
        self._ended = self._ended or loss <= 0
        if self._ended:
            return {}
        value = math.log(loss)
        if self._first is None:
            self._first = value
        findings = self._watch(step, value)
        if self._short.add(step, value, self._noise):
            findings |= self._rising(step, self._short) | self._ruined(step, worse_than_nothing)
            if len(self._recent) == self.window:
                self._level = level = median(self._recent)
                self._spread = max(NARROWEST, OF_MAD * median([abs(value - level) for value in self._recent]))
        if group := self._long.add(step, value, self._noise):
            findings |= self._rising(step, self._long) | self._swinging(step, group) | self._resting(step)
        return findings

    def conclude(self, step: int) -> Findings:
        """Return the divergence that was under way when the run ended early."""
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
        findings: Findings = {}
        if self._event:
            if self._is_off(value, self.spike / 2) and (value > self._level) == (self._event[0] > self._level):
                self._event.append(value)
                return self._event_stays() if len(self._event) == 2 * GROUP else {}
            findings = self._event_over()
        elif self._is_off(value, self.spike) and self._is_abrupt(value):
            self._event, self._event_from = [value], step
            return {}
        self._recent.append(value)
        if len(self._recent) > self.window:
            del self._recent[0]
        return findings

    def _is_off(self, value: float, deviations: float) -> bool:
        return self._spread is not None and abs(value - self._level) > max(LEAST, deviations * self._spread)

    def _is_abrupt(self, value: float) -> bool:
        # An abrupt value is outside the range of the window, and does not continue a slope.
        if min(self._recent) <= value <= max(self._recent):
            return False
        return min(abs(value - before) for before in self._recent[-5:]) > abs(value - self._level) / 2

    def _event_over(self) -> Findings:
        event, self._event = self._event, []
        # The window now contains the spike, so a later spike that is not higher is not reported.
        self._recent = [*self._recent, *event][-self.window :]
        if event[0] < self._level:
            return {}  # a fall that does not last comes from an easy batch
        self.num_spikes += 1
        if self.num_spikes & (self.num_spikes - 1):
            return {}  # a run may have hundreds: only the first, second, fourth, eighth are reported
        assert self._spread is not None
        peak, lasted = max(event), len(event)
        updates = "1 update" if lasted == 1 else f"{lasted} updates"
        why = (
            f"{math.exp(peak):.3g}, {math.exp(peak - self._level):.3g} times its median and "
            f"{(peak - self._level) / self._spread:.0f} deviations above it, for {updates}; spike {self.num_spikes} of "
            "this run, from odd samples or a learning rate near its limit"
        )
        what = f"the loss spikes at step {self._event_from:,} and comes back"
        return {"spike": Finding("warning", what, why, "the plugin clip, which makes spikes smaller")}

    def _event_stays(self) -> Findings:
        event, self._event = self._event, []
        before, now = self._level, median(event)
        self._recent, self._spread = event, None  # the values have a new level, and its window is not full yet
        if now > before or "divergence" in self.alarms:
            return {}  # a rise is reported by `_rising`
        if event[0] - before > 0.7 * (now - before):
            return {}  # the loss fell over several updates: the network learns fast
        what = f"the loss drops at step {self._event_from:,} and stays"
        why = f"{math.exp(now):.3g}, {math.exp(before):.3g} before; learning is seldom so abrupt"
        return {"drop": Finding("warning", what, why, "a look for repeated or blank samples from that step on")}

    # Levels

    def _noise(self) -> float:
        # The noise is computed from differences, on which a trend has no effect.
        if len(self._recent) < 2:
            return math.inf
        return max(NARROWEST, OF_DIFFERENCE * median([abs(b - a) for a, b in pairwise(self._recent)]))

    def _rising(self, step: int, levels: Levels) -> Findings:
        level, by_long = levels.values[-1], levels is self._long
        # The median of a group that ends within an oscillation moves with its phase.
        is_swing = by_long and level - levels.lowest < math.log1p(self._swing)
        if (
            levels.risen >= IN_A_ROW
            and not is_swing
            and (findings := self._divergence(step, level, levels.lowest, levels.lowest_at, levels.limit / 2, by_long))
        ):
            return findings
        calm = max(levels.values[-IN_A_ROW:]) < self._back_below
        if "divergence" in self.alarms and by_long == self._by_long and calm:
            self.alarms.news(step, "divergence", None)
            self._long.risen = 0
            return {"recovery": Finding("info", "the loss has come back", f"{math.exp(level):.3g} at step {step:,}")}
        return {}

    def _ruined(self, step: int, worse_than_nothing: bool) -> Findings:
        # A rate that is much too high may ruin a network before the first level.
        level, num = self._short.values[-1], self._short.num
        if "divergence" in self.alarms or num > STARTING:
            return {}
        assert self._first is not None
        self._above_first = self._above_first + 1 if level - self._first > START else 0
        if self._above_first >= IN_A_ROW:
            self._ruin, self._ruin_at = level, step
        if self._ruin is None:
            return {}
        # The first loss is a single value and noisy, so all later losses must be above it, and the levels far above it.
        rise = min(self._short.values[-IN_A_ROW:]) - self._first
        alone = min(self._recent[1:]) > self._first and rise > max(math.log(2), MARGIN * self._noise())
        # `worse_than_nothing` is known only at a log, which may come after the rise.
        if not worse_than_nothing and not alone:
            return {}
        ruin, self._ruin = self._ruin, None
        return self._divergence(self._ruin_at, ruin, self._first, 1, START)

    def _divergence(
        self, step: int, level: float, before: float, before_at: int, slack: float, by_long: bool = False
    ) -> Findings:
        now, ratio = math.exp(level), math.exp(level - before)
        finding = rate_too_high(
            f"the loss diverges: {now:.3g} at step {step:,}, {ratio:.3g} times the {math.exp(before):.3g} of step "
            f"{before_at:,}, which was still good"
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
        what = f"the loss has been flat since step {step - num * self.window:,}"
        why = f"{math.exp(level):.3g}, {change:+.1%} ± {2 * spread:.1%} in all: converged at this learning rate"
        finding = Finding("info", what, why, "to judge by samples or the FID, which improve for much longer")
        is_flat = abs(change) + 2 * spread <= FLAT
        if not self.alarms.news(step, "plateau", finding if is_flat else None, over=over):
            return {}
        self._flat = level
        return {"plateau": finding}

    def _swinging(self, step: int, group: Sequence[float]) -> Findings:
        swing = period(group)
        updates, self._swing = swing or (0, 0.0)
        why = f"by ±{self._swing:.0%}, once in {updates} updates: at the edge of stability, or data that repeats"
        what = f"the loss has oscillated since step {step - len(group):,}"
        finding = Finding("warning", what, why, "a third of the learning rate")
        return {"oscillation": finding} if self.alarms.news(step, "oscillation", finding if swing else None) else {}


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Return the change of the least-squares line over at least three `values`, and its standard error."""
    num = len(values)
    places = [index - (num - 1) / 2 for index in range(num)]
    squares = sum(place * place for place in places)
    slope, middle = sum(p * v for p, v in zip(places, values, strict=True)) / squares, fmean(values)
    left = sum((v - middle - slope * p) ** 2 for p, v in zip(places, values, strict=True))
    return slope * (num - 1), math.sqrt(left / (num - 2) / squares) * (num - 1)


def period(values: Sequence[float]) -> tuple[int, float] | None:
    """Return the period and the amplitude of a regular swing, or None.

    The autocorrelation r of the deviations from the line of `trend` must return above 0.5 at a whole period after it
    was below -0.4. The autocorrelation of noise is within 2 / sqrt(n) of 0. There must be at least four periods.
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
