"""What the numbers of gradients and updates say, in words: numbers in, findings out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import define

Cause = Literal["rate", "exploding", "vanishing", "fading", "dead"]

ADVICE: dict[Cause, str] = {
    "rate": "try a tenth of optimizer.lr, or a warm-up (plugins.lr.warmup)",
    "exploding": "try a lower learning rate or a longer warm-up, and the plugin clip (with it, a lower max_norm)",
    "vanishing": "try norms or residual connections, activations that do not saturate, or another model.init",
    "fading": "has the loss become zero? If not, look for saturated activations and a learning rate that was too high",
    "dead": "are they part of the loss? If so, look for an activation that is off for every input, a factor that stays "
    "zero, or an underflow in fp16 (precision = 'bf16')",
}
IN_SHORT: dict[Cause, str] = {
    "rate": "learning rate too high",
    "exploding": "exploding",
    "vanishing": "vanishing",
    "fading": "vanishing over time",
    "dead": "dead layers",
}

EARLY = 20  # steps: the first are like no others
RISING = 1.2  # recent over usual: from here on a number is getting better by itself


@define(frozen=True, kw_only=True)
class Limits:
    """Beyond what a number means trouble."""

    explode: float = 10.0  # recent norm over usual norm
    vanish: float = 1e-5  # norms of the first third of the tensors over the last third's; recent norm over usual norm
    max_update: float = 0.05  # change over weights, L2, of one update
    max_growth: float = 2.0  # weights over weights, L2, within a window


@define(frozen=True, kw_only=True)
class Numbers:
    """What a diagnosis is made of."""

    steps: int  # of the history
    recent: float  # median of the total norm in the newest tenth of the history, which is `num_recent(steps)` steps
    usual: float  # median of the total norm in the rest of it
    depth: float  # norm of the first third of the tensors over that of the last third; median as in recent
    usual_depth: float  # the same, median as in usual
    update: float  # |change| / |weights| of one update, L2 over all
    growth: float  # |weights| over what they were at most a window before; the largest since the last diagnosis
    dead: int = 0  # tensors whose gradient was exactly zero in each step of a full window


@define(frozen=True)
class Finding:
    """One thing that is wrong."""

    cause: Cause
    what: str  # with its numbers
    naming: str  # how tensors are brought in, as "largest in"

    def told(self, step: int, names: Sequence[str], more: int = 0) -> str:
        """Return the text for people: the first line says what and in which tensors, the second what to try."""
        rest = f" and {more} more" if more else ""
        tensors = f"; {self.naming} {', '.join(names)}{rest}" if names else ""
        return f"step {step}: {self.what}{tensors}\n  {ADVICE[self.cause]}"


def num_recent(steps: int) -> int:
    """Return how many of the last `steps` are the recent ones."""
    return max(1, steps // 10)


def diagnose(numbers: Numbers, limits: Limits) -> list[Finding]:
    """Return what is wrong, the likeliest cause of the rest first; an empty list means healthy."""
    found = []
    recent, usual = numbers.recent, numbers.usual
    span = f"the median of the {numbers.steps - num_recent(numbers.steps)} steps before"
    if numbers.growth > limits.max_growth:
        changed = f"the weights grew to {numbers.growth:.3g} times their norm in a few steps"
        found.append(Finding("rate", f"learning rate too high: {changed}", "now most in"))
    elif numbers.update > limits.max_update and numbers.steps >= EARLY:
        changed = f"one update changed the weights by {numbers.update:.2g} of their norm"
        found.append(Finding("rate", f"learning rate too high: {changed}", "most in"))
    if numbers.steps < EARLY:
        return found
    if recent > limits.explode * usual > 0:
        grown = f"norm {recent:.3g} is {recent / usual:.3g} times {span}"
        found.append(Finding("exploding", f"exploding gradients: {grown}", "largest in"))
    # Behind an output layer that starts at zero gradients are tiny at first, but they grow from step to step.
    if 0 < numbers.depth < min(limits.vanish, RISING * numbers.usual_depth):
        weak = f"in the first third of the model they are {numbers.depth:.1e} of those in the last third"
        found.append(Finding("vanishing", f"vanishing gradients: {weak}", "smallest in"))
    if 0 < recent < limits.vanish * usual:
        fallen = f"norm {recent:.3g} is {recent / usual:.1e} of {span}"
        found.append(Finding("fading", f"vanishing gradients: {fallen}", ""))
    if numbers.dead:
        zero = f"the gradient was zero in each of the last {numbers.steps} steps"
        found.append(Finding("dead", f"dead layers: {zero}", "in"))
    return found


def diagnose_nan(norms: Sequence[float], loss: float, num_bad: int, num_tensors: int, limits: Limits) -> str:
    """Say where a value that is not finite came from.

    norms: total norms of the steps before, oldest first. num_bad: tensors whose gradient is not finite.
    """
    where = f"loss {loss:.3g}, gradients of {num_bad} of {num_tensors} tensors"
    recent = num_recent(len(norms))
    usual = statistics.median(norms[:-recent]) if len(norms) > recent else math.nan
    if norms and max(norms[-recent:]) > limits.explode * usual:
        grown = f"norm {norms[-1]:.3g} in the step before, {norms[-1] / usual:.3g} times the median"
        before = f"after exploding gradients ({grown}): the learning rate is too high, or clipping too late"
    elif math.isfinite(loss):
        before = "in the backward pass of a finite loss: a root, logarithm or division at zero, or half precision"
    elif norms:
        before = f"all at once (norm {norms[-1]:.3g} in the step before): look at this batch first"
    else:
        before = "in the first step: look at the data and the initial weights"
    return f"NaN {before}; {where}"


def conclude(looks: int, found: Mapping[str, int], num_nan: int) -> str:
    """Return the last word on a run: of `looks` diagnoses, `found` counts those of each cause."""
    told = [f"{short} at {found[cause]}" for cause, short in IN_SHORT.items() if found.get(cause)]
    parts = [f"{', '.join(told)} of {looks} logged steps" if told else f"healthy at {looks} of {looks} logged steps"]
    parts = parts if looks else []
    parts += [f"not finite at {num_nan} step" + "s" * (num_nan > 1)] if num_nan else []
    return "; ".join(parts)
