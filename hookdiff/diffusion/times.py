"""Distributions of times: which noise levels a training step looks at."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from attrs import define, field
from attrs.validators import gt
from torch import Generator, Tensor

from hookdiff.choices import Choice
from hookdiff.diffusion.process import Process

_MOST = 1 - 2.0**-24  # the largest float32 below 1


def uniforms(num: int, generator: Generator, *, stratified: bool = False) -> Tensor:
    """Return `num` numbers, uniform in [0, 1), float32, on the generator's device.

    `stratified`: one in each of `num` equal parts of the range, in random order, which makes the mean over a batch
    less noisy; each number alone is still uniform (Kingma et al. 2021, arXiv 2107.00630, have the
    variant with one random offset for all).
    """
    drawn = torch.rand(num, generator=generator, device=generator.device, dtype=torch.float32)
    if not stratified:
        return drawn
    part = torch.randperm(num, generator=generator, device=generator.device)
    return ((part + drawn) / num).clamp_(max=_MOST)  # the sum may have been rounded up


def _normal(fraction: Tensor, mean: float, std: float) -> Tensor:
    # By the inverse of the distribution function, so that stratified fractions become stratified times.
    normal: Tensor = torch.special.ndtri(fraction.clamp(2.0**-25, _MOST))
    return mean + std * normal


@define(frozen=True)
class Times(Choice, ABC):
    """Draws the times of a batch."""

    kind = "times"

    stratified: bool = field(default=False, kw_only=True)  # spread the times of a batch evenly

    @abstractmethod
    def at(self, process: Process, fraction: Tensor) -> Tensor:
        """Return the times of `process`, int64 timesteps or float32, for a `fraction` (n) that is uniform in [0, 1)."""

    def draw(self, process: Process, num: int, generator: Generator) -> Tensor:
        """Return `num` times, int64 timesteps or float32, on the generator's device."""
        return self.at(process, uniforms(num, generator, stratified=self.stratified))

    def check(self, process: Process) -> None:
        """Raise ValueError, naming `times`, for a process that they cannot be drawn for."""


@define(frozen=True)
class UniformTimes(Times):
    """Equally often from everywhere on the way from image to noise."""

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        """Return the times at `fraction` of the way."""
        return process.from_fraction(fraction)


@define(frozen=True)
class LogitNormal(Times):
    """More often from the middle of the way: its logit is N(mean, std²). Esser et al. 2024 (arXiv 2403.03206)."""

    mean: float = 0.0
    std: float = field(default=1.0, validator=gt(0))

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        """Return the times at the sigmoid of a normal number of the way."""
        return process.from_fraction(_normal(fraction, self.mean, self.std).sigmoid().clamp(max=_MOST))


@define(frozen=True)
class LogNormal(Times):
    """With ln(sigma / alpha) from N(mean, std²). Karras et al. 2022 (arXiv 2206.00364), table 1."""

    mean: float = -1.2
    std: float = field(default=1.2, validator=gt(0))

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        """Return the times with these noise levels."""
        return process.from_log_ratio(_normal(fraction, self.mean, self.std))

    def check(self, process: Process) -> None:
        """Refuse timesteps that end in pure noise, which would never be drawn."""
        if process.has_timesteps and process.ends_in_noise:
            raise ValueError(
                "'times' cannot be 'log_normal' with rescale_betas_zero_snr: the last timestep, where sigma / alpha is "
                "infinite, would never be trained; use 'uniform' or 'logit_normal'"
            )


Times.known = {"uniform": UniformTimes, "logit_normal": LogitNormal, "log_normal": LogNormal}


def to_times(value: Times | str) -> Times:
    """Return the times that `value` is, or names."""
    return Times.of(value)
