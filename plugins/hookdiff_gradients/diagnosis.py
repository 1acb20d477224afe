"""Judges the numbers of gradients and updates."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import define

from hookdiff import Finding
from hookdiff.log import LOWER_RATE, dead_layers, error_if, judge, rate_too_high

Cause = Literal["rate", "exploding", "vanishing", "fading", "dead"]

NAMES: dict[Cause, str] = {
    "rate": "learning rate too high",
    "exploding": "exploding gradients",
    "vanishing": "vanishing gradients",
    "fading": "fading gradients",
    "dead": "dead layers",
}
BETTER_DEPTH = "norms or residual connections, activations that do not saturate, or another model.init"
SATURATED = "a lower learning rate, or activations that do not saturate; a loss of zero has no gradient either"
IN_BACKWARD = "no root, logarithm or division at zero, and no half precision"

EARLY = 20  # steps at the start, in which gradients are unusual
RISING = 1.2  # recent over usual: above this ratio, a small number recovers by itself


@define(frozen=True)
class Limits:
    """Thresholds of the rules, from the options of the same names."""

    explode: float
    vanish: float
    max_update: float
    max_growth: float


@define(frozen=True, kw_only=True)
class Numbers:
    """The numbers of a diagnosis."""

    steps: int  # of the history
    recent: float  # median of the total norm in the newest tenth of the history, which is `num_recent(steps)` steps
    usual: float  # median of the total norm in the rest of the history
    depth: float  # norm of the first third of the tensors over that of the last; median of the recent steps
    usual_depth: float  # the same ratio; median of the other steps
    update: float  # |change| / |weights| of one update, L2 over all tensors
    growth: float  # largest growth factor of |weights| within a window, since the last diagnosis
    dead: int = 0  # tensors whose gradient was exactly zero in each step of a full window


def num_recent(steps: int) -> int:
    """Return how many of the last `steps` count as recent."""
    return max(1, steps // 10)


def diagnose_gradients(numbers: Numbers, limits: Limits) -> dict[Cause, Finding]:
    """Return the findings, the likeliest root cause first; {} means healthy."""
    recent, usual, depth, settled = numbers.recent, numbers.usual, numbers.depth, numbers.steps >= EARLY
    grows = numbers.growth > limits.max_growth
    jumps = settled and numbers.update > limits.max_update
    explodes = settled and recent > limits.explode * usual > 0
    # Before an output layer that starts at zero, gradients are tiny at first, but grow with each step.
    vanishes = settled and 0 < depth < min(limits.vanish, RISING * numbers.usual_depth)
    fades = settled and 0 < recent < limits.vanish * usual
    changed = f"one update changed the weights by {numbers.update:.2g} of their norm"
    if grows:
        changed = f"the weights grew to {numbers.growth:.3g} times their norm in a few steps"
    ratio, span = recent / (usual or math.nan), numbers.steps - num_recent(numbers.steps)
    norm = f"norm {recent:.3g} is {ratio:.3g} times the median of the {span} steps before"
    weak = f"gradients in the first third of the model are {depth:.1e} of those in the last third"
    zero = f"in each of the last {numbers.steps} steps"
    rules: list[tuple[Cause, object, Finding]] = [
        ("rate", grows or jumps, rate_too_high(changed)),
        ("exploding", explodes, Finding("warning", NAMES["exploding"], norm, LOWER_RATE)),
        ("vanishing", vanishes, Finding("warning", NAMES["vanishing"], weak, BETTER_DEPTH)),
        ("fading", fades, Finding("warning", NAMES["fading"], norm, SATURATED)),
        ("dead", settled and numbers.dead, dead_layers(zero)),
    ]
    return {cause: finding for cause, holds, finding in rules if holds}


def diagnose_nan(norms: Sequence[float], loss: float, num_bad: int, num_tensors: int, limits: Limits) -> Finding:
    """Return why a step is not finite.

    Args:
        norms: total norms of the steps before, oldest first.
        loss: loss of the step.
        num_bad: number of tensors with a gradient that is not finite.
        num_tensors: number of all tensors with a gradient.
        limits: thresholds; `explode` is used.
    """
    recent = num_recent(len(norms))
    usual = statistics.median(norms[:-recent]) if len(norms) > recent else math.nan
    last = norms[-1] if norms else math.nan
    exploded = max(norms[-recent:], default=0.0) > limits.explode * usual
    before = f"; norm {last:.3g} in the step before, {last / (usual or math.nan):.3g} times the median" if norms else ""
    return judge(
        f"loss {loss:.3g}, gradients of {num_bad} of {num_tensors} tensors{before}",
        error_if(exploded, "NaN after exploding gradients", LOWER_RATE),
        error_if(math.isfinite(loss), "NaN in the backward pass of a finite loss", IN_BACKWARD),
        error_if(norms, "NaN all at once", "to look at this batch first"),
        error_if(True, "NaN in the first step", "to look at the data and the initial weights"),
    )


def conclude(num_diagnoses: int, num_found: Mapping[str, int], num_nan: int) -> str:
    """Return the summary of a run; `num_found` has the number of diagnoses that found each cause."""
    causes = [f"{name} at {num_found[cause]}" for cause, name in NAMES.items() if num_found.get(cause)]
    healthy = f"healthy at {num_diagnoses}"
    parts = [f"{', '.join(causes) or healthy} of {num_diagnoses} logged steps"] if num_diagnoses else []
    parts += [f"not finite at {num_nan} step" + "s" * (num_nan > 1)] if num_nan else []
    return "; ".join(parts)
