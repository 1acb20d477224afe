"""The weight of each step in an average: decays, warm-ups and the power functions of EDM2.

EDM2 is Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv 2312.02696,
section 3.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field
from attrs.validators import gt
from numpy.typing import NDArray

from hookdiff.options import Choice, about

MAX_STD = math.sqrt(1 / 12)  # width of the power function with gamma 0: all steps have the same weight

Floats = NDArray[np.float64]


def half_life_decay(half_life: float) -> float:
    """Return the decay per update with which the share of a step halves in `half_life` > 0 updates."""
    return float(0.5 ** (1 / half_life))


def step_weights(decay: Callable[[int], float], updates: int) -> Floats:
    """Return the share of the weights of each step in an average after `updates` >= 1 updates: updates + 1, sum 1.

    The first share belongs to the initial weights. `decay` returns the decay of update n, counted from 0.
    """
    decays = np.array([decay(n) for n in range(updates)])
    later = np.cumprod(np.append(decays, 1.0)[::-1])[::-1]  # the share of a step that is left after all later updates
    return np.append(1.0, 1 - decays) * later


def newest(weights: Floats, share: float) -> int:
    """Return the number of newest steps that make up at least this `share` of an average with these `weights`."""
    return int(np.searchsorted(np.cumsum(weights[::-1]), share * (1 - 1e-12))) + 1


class Warmup(Choice, ABC):
    """How a decay rises to its value, so that an average soon forgets the initial weights."""

    kind = "ema_warmup"
    default = "ratio"

    @abstractmethod
    def highest(self, num_updates: int) -> float:
        """Return the upper limit of a decay after `num_updates` >= 0 updates, in [0, 1]."""


@define(frozen=True)
class Ratio(Warmup):
    """The decay is at most (1 + n) / (10 + n) at update n."""

    def highest(self, num_updates: int) -> float:
        return (1 + num_updates) / (10 + num_updates)


@define(frozen=True)
class Power(Warmup):
    """The decay is at most 1 - (1 + n / inv_gamma)^-power at update n; at n = 0, the average copies the weights."""

    inv_gamma: float = field(default=1.0, validator=gt(0), metadata=about("unit of n in the formula", "updates"))
    power: float = field(
        default=0.75, validator=gt(0), metadata=about("exponent; 0.75 reaches 0.999 at 10,000 updates, 2/3 at 31,600")
    )

    def highest(self, num_updates: int) -> float:
        return float(1 - (1 + num_updates / self.inv_gamma) ** -self.power)


@define(frozen=True)
class NoWarmup(Warmup):
    """The full decay from the start."""

    def highest(self, num_updates: int) -> float:
        return 1.0


Warmup.known = {"ratio": Ratio, "power": Power, "none": NoWarmup}


def power_decay(step: float, gamma: float) -> float:
    """Return the decay of a power-function average at update `step`, counted from 1: EDM2 eq. 2.

    Update k has the share (k^(gamma+1) - (k-1)^(gamma+1)) / step^(gamma+1), the integral of the profile over this
    update. The first update copies the weights.
    """
    return float((1 - 1 / step) ** (gamma + 1))


def gamma_of(std: float) -> float:
    """Return the exponent of the power function of width `std`, a share of the training time in (0, MAX_STD].

    It is the largest root of (g + 2)^2 (g + 3) = (g + 1) / std^2, EDM2 appendix C.
    """
    inverse = float(std) ** -2
    return max(0.0, float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max()))


def overlap(steps: Floats, gammas: Floats, other_steps: Floats, other_gammas: Floats) -> Floats:
    """Return the inner products of power functions that end at `steps` and `other_steps`; arguments are broadcast.

    The product is the integral of (a+1) t^a / s^(a+1) times the other power function, up to the earlier end.
    """
    ratio = (steps / other_steps) ** np.where(steps < other_steps, other_gammas, -gammas)
    longest = np.maximum(steps, other_steps)
    product: Floats = (gammas + 1) * (other_gammas + 1) * ratio / ((gammas + other_gammas + 1) * longest)
    return product


@define(frozen=True, eq=False)
class Fit:
    """The weighted sums of snapshots that are closest to given averages."""

    weights: Floats  # snapshots x averages; each column sums to 1, so that a constant weight does not change
    errors: Floats  # (averages,): L2 norm of the difference in the profile, over the norm of the profile


def fit(steps: Sequence[float], stds: Sequence[float], step: float, targets: Sequence[float]) -> Fit:
    """Fit averages of widths `targets` at `step` to snapshots of widths `stds` at `steps`, all steps >= 1.

    It is the least-squares fit of the profiles (EDM2 algorithm 3) in float64, except that the weights sum to 1.
    """
    at, gammas = np.asarray(steps, np.float64), np.array([gamma_of(std) for std in stds])
    wanted = np.array([gamma_of(std) for std in targets])
    end = np.full(len(wanted), step, np.float64)
    gram = overlap(at[:, None], gammas[:, None], at, gammas)
    right = overlap(at[:, None], gammas[:, None], end, wanted)
    # Scaled to a unit diagonal, because early profiles are much higher than late ones.
    scale = 1 / np.sqrt(np.diag(gram))[:, None]
    columns = np.column_stack((right, np.ones(len(at)))) * scale
    solved = scale * np.linalg.lstsq(gram * scale * scale.T, columns, rcond=None)[0]
    free, shift = solved[:, :-1], solved[:, -1:]
    weights = free + shift * (1 - free.sum(0)) / shift.sum()
    weights /= weights.sum(0)  # with very many snapshots, rounding changes the sum by a millionth
    size = overlap(end, wanted, end, wanted)
    lacking = size - 2 * (weights * right).sum(0) + (weights * (gram @ weights)).sum(0)
    return Fit(weights, np.sqrt(np.maximum(lacking, 0) / size))
