"""The learning-rate range test: trains at growing rates, and finds those at which the loss falls and rises."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import define, evolve

from hookdiff import Config, Every, Loop, UserError, build_loop
from hookdiff.authors import without_log
from hookdiff.experiment import Part
from hookdiff.loop import hooks_of
from hookdiff.terminal import paced
from hookdiff_lr.plugin import OwnRates

# The hooks that decide how a step changes the weights. Plugins that only read values, or save, are left out.
_IN_A_STEP = hooks_of("model", "net", "restore", "epoch", "batch", "passes", "scale", "update")
_REPLACED = ("lr", "progress")  # `lr` would set other rates; `progress` would show the length of `_LONG`
_LONG = Every(86400, "seconds")
_SHARE = 0.1  # suggested rate over the rate from which the loss rises
_CHANCE = 8  # a change of the loss by this many standard errors of the smoothed loss is not by chance
_WINDOWS = 20  # the loss is smoothed over windows of 1/20 of the rates

_FIRST = 10  # the losses at the first 1/10 of the rates show how far a loss varies by chance
_LEAST = 3  # standard deviations of these losses; a smaller fall does not count


@define(frozen=True)
class RangeTest:
    """The losses at growing rates, and the rates at which they change. A rate is that of the first parameter group."""

    rates: list[float]  # rising
    losses: list[float]  # after the update at each of the rates, all finite
    smooth: list[float]  # running median of the losses
    has_diverged: bool
    deviation: float  # standard deviation of the losses at the first tenth of the rates
    falls: float | None  # rate from which the loss is below that of the lowest rates; None if there is no such rate
    lowest: float  # rate with the lowest loss
    rises: float | None  # rate from which the loss rises for good; None if it never does

    @property
    def suggested(self) -> float | None:
        """A tenth of the rate from which the loss rises, with two digits; None if it never falls or never rises."""
        return None if self.falls is None or self.rises is None else float(f"{_SHARE * self.rises:.1e}")

    @property
    def limit(self) -> float:
        """The loss above which the test ends."""
        return _limit(self.losses, len(self.rates), min(self.smooth))

    def remarks(self, rates: Sequence[float]) -> Iterator[str]:
        """Yield advice if the test is inconclusive; `rates` are all planned rates, also those that it did not reach."""
        low, high = rates[0], rates[-1]
        if self.falls is None:
            fall = self.smooth[0] - min(self.smooth)
            yield (
                f"no rate is suggested: the loss falls by {fall:.3g}, and must fall by {_LEAST} times its "
                f"standard deviation at the first tenth of the rates, {self.deviation:.3g}; unless the network is "
                f"trained already, try more rates (--steps {4 * len(rates)}) or larger batches (--set run.batch_size=N)"
            )
        if self.rises is None:
            yield f"the loss does not rise up to the rate {high:g}: go on with --rates {low:g} {100 * high:g}"
        elif self.suggested is not None and self.suggested < low:
            yield f"the suggested rate was not tried: begin with --rates {low / 100:g} {high:g}"

    def loss_at(self, rate: float) -> float:
        """Return the smoothed loss at `rate`, one of `rates`."""
        return self.smooth[self.rates.index(rate)]


def growing(low: float, high: float, num: int) -> list[float]:
    """Return `num` >= 2 rates from `low` > 0 to `high`, each the same multiple of the rate before."""
    return [low * (high / low) ** (k / (num - 1)) for k in range(num)]


def trial_loop(config: Config, folder: Path, resume: Path | None) -> Loop:
    """Return a Loop of `config` for `find`, with the state of the run `resume` if given; it writes only to `folder`."""
    idle = {name: Part(part.where, part.use, object) for name, part in config.plugins.items() if name in _REPLACED}
    run = evolve(config.run, steps=None, epochs=None, max_time=_LONG)
    config = evolve(config, run=run, plugins={**config.plugins, **idle})
    keep = ("micro_batch",) if resume else ("micro_batch", "start")
    return build_loop(config, folder / "run", resume=resume or False, hooks=_IN_A_STEP, keep=keep)


def find(loop: Loop, rates: Sequence[float], adopted: Iterable[str] = ()) -> RangeTest:
    """Train `loop`, which has been entered, for a step at each of the rising `rates`, until the loss diverges.

    The first parameter group gets the rate. All other groups, also those of the plugins `adopted`, keep their ratio to
    the first group. The weights change, so the test has a loop of its own (Smith 2015, arXiv 1506.01186, section 3.3).
    The gradients need noise, as those of a diffusion model have. Without noise, a direction that converged at lower
    rates has to grow from nothing before the loss shows that it diverges.

    Raises:
        UserError: if the first group has no rate above 0, if another plugin sets the rates, or if the loss at the first
            rate is not finite.
    """
    rates_of_config = OwnRates.of(loop, adopted)
    group, first = rates_of_config.groups[0]
    if not first > 0:
        raise UserError(f"the optimizer has the rate {first:g}; set it above 0, so that the rates keep their ratios")
    half, steps, losses = _half(len(rates)), loop.steps(), list[float]()
    lowest, has_diverged = math.inf, False
    with loop.log.muted(), without_log():  # a loss that is not finite is what the test looks for
        # A step returns the loss before its update, so the loss after the update at a rate is that of the next step.
        for rate in paced((*rates, rates[-1]), len(rates) + 1, "learning rates", "steps", size=lambda _: 1):
            rates_of_config.scale(rate / first)
            if (step := next(steps, None)) is None:
                raise UserError(f"the training ended at the rate {rate:.3g}: {loop.end.reason}")
            if not math.isclose(float(group["lr"]), rate, rel_tol=1e-4):
                way_out = "switch it off: --plugins no:NAME"
                raise UserError(f"another plugin sets the rate {group['lr']:g} in place of {rate:g}; {way_out}")
            losses.append(step.loss)
            recent = statistics.median(losses[-half - 1 :])
            lowest = min(lowest, recent)
            has_diverged = not math.isfinite(step.loss) or recent > _limit(losses, len(rates), lowest)
            if has_diverged:
                break
    if len(losses) < 2 * half + 2:
        raise UserError(
            f"the loss is {losses[-1]:.3g} at the rate {rate:.3g} already; begin at a lower rate, or let `hookdiff "
            "doctor` find another cause"
        )
    return judge(rates[: len(losses) - 1], losses[1:], has_diverged)


def judge(rates: Sequence[float], losses: Sequence[float], has_diverged: bool) -> RangeTest:
    """Find the rates at which the loss falls, is lowest, and rises for good. All losses but the last must be finite."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    half = _half(len(losses))
    smooth = [statistics.median(finite[max(0, k - half) : k + half + 1]) for k in range(len(finite))]
    start, lowest = smooth[0], min(smooth)
    deviation = statistics.stdev(finite[: max(2, len(finite) // _FIRST)])
    at = smooth.index(lowest)
    noise = _noise(finite[: max(at, 4 * half)], 2 * half + 1)  # before the loss rises: from there on it varies wildly
    margin = max(0.1 * (start - lowest), 3 * noise)
    falls = rises = None
    # The smallest of many medians is low by chance, hence the larger factor.
    least = max(_CHANCE * noise, _LEAST * deviation)
    if start - lowest > least:
        falls = next((k for k in range(at, 0, -1) if smooth[k - 1] >= start - margin), 0)
    if has_diverged or smooth[-1] - lowest > least:
        rises = 1 + max(k for k, loss in enumerate(smooth) if loss <= lowest + margin)
        while rises - 1 > at and smooth[rises - 2] < smooth[rises - 1]:  # go back to the start of the rise
            rises -= 1
    return RangeTest(
        list(rates[: len(finite)]),
        finite,
        smooth,
        has_diverged,
        deviation,
        falls=None if falls is None else rates[falls],
        lowest=rates[at],
        rises=None if rises is None else rates[min(rises, len(finite) - 1)],
    )


def _noise(losses: Sequence[float], window: int) -> float:
    """Return the standard error of a median of `window` losses, from the differences of neighbouring losses."""
    deviation = 1.05 * statistics.median(abs(a - b) for a, b in itertools.pairwise(losses))
    return 1.25 * deviation / math.sqrt(window)


def _limit(losses: Sequence[float], num: int, lowest: float) -> float:
    """Return the loss above which a training at `num` rates has diverged, well above the highest loss at the start.

    A trained network's loss falls little, so the distance is a multiple of the `lowest` loss, not of the fall.
    """
    return max(losses[: 2 * _half(num) + 1]) + 3 * abs(lowest)


def _half(num: int) -> int:
    """Return the number of losses on either side of a loss that are smoothed with it, if there are `num` losses."""
    return max(1, num // _WINDOWS // 2)
