"""Distributions of times, from which the noise levels of a training step are drawn."""

from abc import ABC, abstractmethod

import torch
from attrs import define, field
from attrs.validators import gt
from torch import Generator, Tensor

from hookdiff.diffusion.process import Process
from hookdiff.options.choices import Choice
from hookdiff.options.fields import IS_FINITE, about

_LARGEST = 1 - 2.0**-24  # the largest float32 below 1


def _normal(fraction: Tensor, mean: float, std: float) -> Tensor:
    # Inverse transform sampling, so that stratified fractions become stratified times.
    normal: Tensor = torch.special.ndtri(fraction.clamp(2.0**-25, _LARGEST))
    return mean + std * normal


@define(frozen=True)
class Times(Choice, ABC):
    """Draws the times of a batch.

    `stratified` draws one time from each of n equally likely parts, in random order. It makes the loss less noisy, and
    does not change the distribution of a single time. Kingma et al. 2021 (arXiv 2107.00630) use one random offset for
    all parts.
    """

    kind = "times"

    stratified: bool = field(default=False, kw_only=True, metadata=about("spread the times of a batch evenly"))

    @abstractmethod
    def at(self, process: Process, fraction: Tensor) -> Tensor:
        """Return the times of `process`, int64 timesteps or float32, for a `fraction` (n) that is uniform in [0, 1)."""

    def draw(self, process: Process, num: int, generator: Generator) -> Tensor:
        """Return `num` times, int64 timesteps or float32, on the generator's device."""
        device = generator.device
        fraction = torch.rand(num, generator=generator, device=device, dtype=torch.float32)
        if self.stratified:
            part = torch.randperm(num, generator=generator, device=device, dtype=torch.float32)
            fraction = part.add_(fraction).div_(num).clamp_(max=_LARGEST)  # the sum may have been rounded up
        return self.at(process, fraction)

    def check(self, process: Process) -> None:
        """Raise ValueError, naming `times`, if such times cannot be drawn for the process."""


@define(frozen=True)
class UniformTimes(Times):
    """Uniform on the way from image to noise."""

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        return process.from_fraction(fraction)


@define(frozen=True)
class LogitNormal(Times):
    """More times in the middle of the way: Esser et al. 2024 (arXiv 2403.03206), section 3.1.

    The logit of the time is N(mean, std²). In a flow it is ln(sigma / alpha). Esser et al. have a mean of 0, for the
    latents of an autoencoder. Pixels vary less, and need more times at little noise: Karras et al. 2022 have -1.2 for
    ln(sigma / alpha), and benchmarks/quality.py is best between -1 and 0.
    """

    mean: float = field(
        default=-0.5,
        validator=IS_FINITE,
        metadata=about("mean of the logit of the time; lower: more of the training at little noise"),
    )
    std: float = field(default=1.0, validator=gt(0), metadata=about("standard deviation of the logit of the time"))

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        return process.from_fraction(_normal(fraction, self.mean, self.std).sigmoid().clamp(max=_LARGEST))


@define(frozen=True)
class LogNormal(Times):
    """Noise levels with a normally distributed logarithm: Karras et al. 2022 (arXiv 2206.00364), table 1.

    ln(sigma / alpha) is N(mean, std²).
    """

    mean: float = field(default=-1.2, validator=IS_FINITE, metadata=about("mean of ln(sigma / alpha)"))
    std: float = field(default=1.2, validator=gt(0), metadata=about("standard deviation of ln(sigma / alpha)"))

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        return process.from_log_ratio(_normal(fraction, self.mean, self.std))

    def check(self, process: Process) -> None:
        if process.has_timesteps and process.ends_in_noise:
            raise ValueError(
                "'times' cannot be 'log_normal' with rescale_betas_zero_snr: the last timestep, where sigma / alpha is "
                "infinite, would never be trained; use 'uniform' or 'logit_normal'"
            )


Times.known = {"uniform": UniformTimes, "logit_normal": LogitNormal, "log_normal": LogNormal}
