"""Solvers, which take x from one point of the process to the next, less noisy point.

Their formulas are written in the two rates of x_t = alpha * x0 + sigma * noise. For a variance-preserving process they
equal the formulas of the papers, and they hold for other processes too.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from attrs import define, field
from attrs.validators import ge, gt, in_
from torch import Tensor

from hookdiff.diffusion.chain import Chain
from hookdiff.diffusion.prediction import q_sample
from hookdiff.diffusion.process import VP, Point, Process
from hookdiff.options.choices import Choice
from hookdiff.options.fields import about, between

_NOISE = 1000  # sigma / alpha above which x is almost pure noise


class Solver(Choice, ABC):
    """Makes one step of a chain from noise to image."""

    kind = "sampler"
    usual_steps: ClassVar[int] = 50  # default number of steps of a chain

    def check(self, process: Process) -> None:
        """Raise ValueError, naming `sampler`, unless the solver can be used with `process`."""

    @abstractmethod
    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        """Return x at the point `end` for `x` (n c h w) at `start`; `chain.predict` calls the network."""


def _added_variance(start: Point, end: Point) -> float:
    """Return the variance of x_start given x_end, which is beta for neighbouring timesteps."""
    return max(0.0, start.sigma**2 - (start.alpha / end.alpha * end.sigma) ** 2)


@define(frozen=True)
class DDIM(Solver):
    """Deterministic sampling, or with a share of DDPM's noise: Song et al. 2020 (arXiv 2010.02502), eq. 12.

    The noise has the sigma of eq. 16. With `eta` 0 it is Euler's method for the probability flow ODE; with `eta` 1 it
    is DDPM with its small variance.
    """

    eta: float = field(default=0.0, validator=between(0, 1), metadata=about("share of DDPM's noise added in each step"))
    final: Literal["image", "first"] = field(
        default="image",
        validator=in_(("image", "first")),
        metadata=about(
            'where the last step ends: "image", or "first": at timestep 0, which has some noise left; only process '
            '"vp" or "ddpm" (set_alpha_to_one = false in diffusers)'
        ),
    )

    def check(self, process: Process) -> None:
        if self.final == "first" and not isinstance(process, VP):
            raise ValueError(f"'sampler.final' cannot be 'first' for process {process.use!r}, which has no timesteps")

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        process = chain.diffusion.process
        if self.final == "first" and not end.sigma and isinstance(process, VP):
            [end] = process.at_timesteps([0])
        x0, noise = chain.predict(x, start)
        fresh = self.eta**2 * _added_variance(start, end) * (end.sigma / start.sigma) ** 2  # variance
        mean = end.alpha * x0 + math.sqrt(max(0.0, end.sigma**2 - fresh)) * noise
        return chain.noised(mean, math.sqrt(fresh))


@define(frozen=True)
class DDPM(Solver):
    """Ancestral sampling: Ho et al. 2020 (arXiv 2006.11239), algorithm 2.

    The mean is from eq. 7. If timesteps are skipped, beta is that of a process with only the visited timesteps
    (Nichol & Dhariwal 2021, arXiv 2102.09672, section 4).
    """

    variance: Literal["fixed_small", "fixed_large"] = field(
        default="fixed_small",
        validator=in_(("fixed_small", "fixed_large")),
        metadata=about('variance of the added noise: "fixed_small" is the posterior\'s, "fixed_large" is beta'),
    )

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        x0, _ = chain.predict(x, start)
        beta, ratio = _added_variance(start, end), (end.sigma / start.sigma) ** 2
        mean = (end.alpha * beta / start.sigma**2) * x0 + (start.alpha / end.alpha * ratio) * x
        variance = beta * ratio if self.variance == "fixed_small" else beta
        return chain.noised(mean, math.sqrt(variance) if end.sigma else 0.0)  # the image itself gets no noise


@define(frozen=True)
class Churning(Solver):
    """A solver that may add fresh noise before each step: Karras et al. 2022 (arXiv 2206.00364), algorithm 2."""

    churn: float = field(default=0.0, validator=ge(0), metadata=about("S_churn: amount of fresh noise over all steps"))
    churn_min: float = field(default=0.0, validator=ge(0), metadata=about("S_tmin: min. sigma / alpha with churn"))
    churn_max: float = field(default=math.inf, validator=ge(0), metadata=about("S_tmax: max. sigma / alpha with churn"))
    churn_noise: float = field(default=1.0, validator=gt(0), metadata=about("S_noise: std of the fresh noise"))

    def raised(self, start: Point, steps: int) -> float:
        """Return the noise level sigma / alpha to which x at `start` is raised before one of `steps` steps."""
        churns = start.alpha and self.churn_min <= start.ratio <= self.churn_max
        return start.ratio * (1 + (min(self.churn / steps, math.sqrt(2) - 1) if churns else 0.0))

    def churned(self, chain: Chain, x: Tensor, start: Point) -> tuple[Tensor, Point]:
        """Return `x` with fresh noise, and its new, noisier point."""
        level = self.raised(start, chain.steps)
        if level == start.ratio:
            return x, start
        higher = chain.diffusion.process.at(level)
        std = self.churn_noise * math.sqrt(level**2 - start.ratio**2)
        return chain.noised(x / start.alpha, std) * higher.alpha, higher


@define(frozen=True)
class Euler(Churning):
    """Euler's method for the probability flow: Karras et al. 2022 (arXiv 2206.00364), algorithm 2, no correction."""

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        x, start = self.churned(chain, x, start)
        # In any coordinates of the probability flow ODE, an Euler step holds the predicted x0 and noise constant.
        return q_sample(*chain.predict(x, start), end.alpha, end.sigma)


@define(frozen=True)
class Heun(Churning):
    """Heun's method, two calls of the network a step: Karras et al. 2022 (arXiv 2206.00364), algorithms 1 and 2."""

    usual_steps: ClassVar[int] = 25

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        x, start = self.churned(chain, x, start)
        x0, noise = chain.predict(x, start)
        x_end = q_sample(x0, noise, end.alpha, end.sigma)
        process = chain.diffusion.process
        unreadable = chain.diffusion.prediction.needs_sigma or chain.clipping.clips  # they divide by sigma
        if not end.sigma and (unreadable or not process.reaches_image):
            return x_end  # no correction at sigma = 0, as in algorithm 2
        if not process.straight and start.ratio > _NOISE:
            return x_end  # the correction multiplies the error of the slope by sigma / alpha, which may be infinite
        x0_end, noise_end = chain.predict(x_end, end)
        slope = (noise + noise_end) / 2
        if process.straight:
            return x + (end.alpha - start.alpha) * (x0 + x0_end) / 2 + (end.sigma - start.sigma) * slope
        return end.alpha * (x / start.alpha + (end.ratio - start.ratio) * slope)


@define(frozen=True)
class DPMSolver2M(Solver):
    """DPM-Solver++(2M), of second order: Lu et al. 2022 (arXiv 2211.01095), algorithm 2.

    The first and the last step are DDIM steps, and so is the second after a first step from pure noise, because the
    half log-SNR lambda is infinite at both ends.
    """

    usual_steps: ClassVar[int] = 25

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        x0, _ = chain.predict(x, start)
        earlier, chain.earlier = chain.earlier, [(x0, start)]
        linear = end.sigma / start.sigma * x
        # alpha' (1 - exp(-h)), in a form that stays correct where lambda is infinite
        weight = end.alpha - start.alpha * end.sigma / start.sigma
        if earlier and end.sigma:
            (previous, before), *_ = earlier
            h, h_previous = math.log(start.ratio / end.ratio), math.log(before.ratio / start.ratio)
            x0 = x0 + (x0 - previous) * (h / (2 * h_previous))
        return linear + weight * x0


Solver.known = {"ddim": DDIM, "ddpm": DDPM, "euler": Euler, "heun": Heun, "dpmpp_2m": DPMSolver2M}
