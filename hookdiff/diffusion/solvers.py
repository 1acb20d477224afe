"""Solvers: how a sampler leads x from one moment to the next, less noisy one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

from attrs import define, field
from attrs.validators import ge, gt, in_
from torch import Tensor

from hookdiff.choices import Choice
from hookdiff.diffusion.chain import Chain
from hookdiff.diffusion.prediction import q_sample
from hookdiff.diffusion.process import Point
from hookdiff.diffusion.steps import churned, ddim_step, ddpm_step, dpmpp_2m_step, heun_step
from hookdiff.options import between


class Solver(Choice, ABC):
    """Makes one step of a chain from noise to image."""

    kind = "sampler"

    @abstractmethod
    def step(self, chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
        """Return what `x` (n c h w) at `now` becomes at `after`; `chain.look` asks the network."""


@define(frozen=True)
class DDIM(Solver):
    """Song et al. 2020 (arXiv 2010.02502), eq. 12."""

    eta: float = field(default=0.0, validator=between(0, 1))  # how much of DDPM's noise is added back in each step

    def step(self, chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
        """Make `ddim_step`."""
        return chain.noised(*ddim_step(*chain.look(x, now), now, after, self.eta))


@define(frozen=True)
class DDPM(Solver):
    """Ancestral sampling: Ho et al. 2020 (arXiv 2006.11239), algorithm 2."""

    # of the noise that is added: that of the posterior, or beta
    variance: Literal["fixed_small", "fixed_large"] = field(
        default="fixed_small", validator=in_(("fixed_small", "fixed_large"))
    )

    def step(self, chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
        """Make `ddpm_step`."""
        x0, _ = chain.look(x, now)
        return chain.noised(*ddpm_step(x, x0, now, after, self.variance))


@define(frozen=True)
class Churning(Solver):
    """A solver that may add fresh noise before each step: Karras et al. 2022 (arXiv 2206.00364), algorithm 2."""

    churn: float = field(default=0.0, validator=ge(0))  # S_churn: how much noise, over all steps
    churn_min: float = field(default=0.0, validator=ge(0))  # S_tmin: the least sigma / alpha where it is added
    churn_max: float = field(default=math.inf, validator=ge(0))  # S_tmax: the largest
    churn_noise: float = field(default=1.0, validator=gt(0))  # S_noise: its standard deviation

    def churned(self, chain: Chain, x: Tensor, now: Point) -> tuple[Tensor, Point]:
        """Return `x` raised to a higher noise level, and that moment."""
        level = churned(now, self.churn, chain.steps, self.churn_min, self.churn_max)
        if level == now.ratio:
            return x, now
        higher = chain.diffusion.process.at(level)
        std = self.churn_noise * math.sqrt(level**2 - now.ratio**2)
        return chain.noised(x / now.alpha, std) * higher.alpha, higher


@define(frozen=True)
class Euler(Churning):
    """Euler's method for the probability flow: Karras et al. 2022 (arXiv 2206.00364), algorithm 2, uncorrected."""

    def step(self, chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
        """Move in a straight line."""
        x, now = self.churned(chain, x, now)
        # Whatever the coordinates of the probability flow, Euler's method moves x0 and the noise apart in a straight
        # line.
        return q_sample(*chain.look(x, now), after.alpha, after.sigma)


@define(frozen=True)
class Heun(Churning):
    """Heun's method, of second order: Karras et al. 2022 (arXiv 2206.00364), algorithms 1 and 2. Two calls a step."""

    def step(self, chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
        """Make Euler's step, and correct it by what the network sees at its end."""
        x, now = self.churned(chain, x, now)
        seen, process = chain.look(x, now), chain.diffusion.process
        end = q_sample(*seen, after.alpha, after.sigma)
        unreadable = chain.diffusion.prediction.needs_sigma or chain.clipping.clips  # a division by sigma
        if not after.sigma and (unreadable or not process.knows_image):
            return end  # as algorithm 2 of the paper
        if not now.alpha and not process.straight:
            return end  # sigma / alpha is infinite
        return heun_step(x, seen, chain.look(end, after), now, after, straight=process.straight)


@define(frozen=True)
class DPMSolver2M(Solver):
    """DPM-Solver++(2M): Lu et al. 2022 (arXiv 2211.01095), algorithm 2."""

    def step(self, chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
        """Make `dpmpp_2m_step`, with what the step before saw."""
        x0, _ = chain.look(x, now)
        before, chain.before = chain.before, (x0, now)
        return dpmpp_2m_step(x, x0, before, now, after)


Solver.known = {"ddim": DDIM, "ddpm": DDPM, "euler": Euler, "heun": Heun, "dpmpp_2m": DPMSolver2M}


def to_sampler(value: Solver | str) -> Solver:
    """Return the sampler that `value` is, or names."""
    return Solver.of(value)
