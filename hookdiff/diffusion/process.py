"""How images turn into noise: x_t = alpha * x0 + sigma * noise, in discrete timesteps or in continuous time.

A process says what its times are, the rates at each, what the network is told of it, and which times a sampler visits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from attrs import define
from torch import Tensor

from hookdiff.diffusion.schedules import NoiseSchedule

_TABLES = "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "log_snr"
_TINY = 2.0**-25  # half of the least distance of two float32 from [0, 1) that torch draws


@define(frozen=True)
class Point:
    """A moment of a process that a sampler visits."""

    alpha: float
    sigma: float
    time: float = 0.0  # what the network is told; an int where the process has timesteps

    @property
    def ratio(self) -> float:
        """Noise-to-signal ratio sigma / alpha: the sigma of Karras et al. 2022; infinite for pure noise."""
        return self.sigma / self.alpha if self.alpha else math.inf


IMAGE = Point(1.0, 0.0)


class Process(Protocol):
    """What turns images into noise."""

    @property
    def spacings(self) -> tuple[str, ...]:
        """The names that `points` knows, the usual one first."""

    @property
    def initial_scale(self) -> float:
        """Standard deviation of the noise that a chain begins with."""

    @property
    def ends_in_noise(self) -> bool:
        """Whether nothing of the image is left at the end: alpha is 0."""

    @property
    def knows_image(self) -> bool:
        """Whether the network may be asked about the image itself, where sigma is 0."""

    @property
    def straight(self) -> bool:
        """Whether alpha and sigma are linear in time as they stand; else they are once alpha is divided out."""

    def from_fraction(self, fraction: Tensor) -> Tensor:
        """Return the times at a `fraction`, in (0, 1), of the way from image to noise."""

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the times at which ln(sigma / alpha) is `log_ratio`, as near as the process comes to it."""

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return alpha, sigma and the log-SNR at `times` (n), each float32 of shape n 1 1 ... (`ndim` axes)."""

    def network_time(self, times: Tensor) -> Tensor:
        """Return what the network is told of `times` (n): n, int64 or float32."""

    def points(self, steps: int, spacing: str, rho: float) -> list[Point]:
        """Return the `steps` moments that a sampler visits, noisiest first, without the image itself."""

    def at(self, ratio: float) -> Point:
        """Return the moment at which sigma / alpha is `ratio`, above 0 and finite."""


def _trailing(timesteps: int, steps: int) -> list[int]:
    return [round(timesteps - i * timesteps / steps) - 1 for i in range(steps)]


def _leading(timesteps: int, steps: int) -> list[int]:
    return [i * timesteps // steps for i in reversed(range(steps))]


_TIMESTEPS: dict[str, Callable[[int, int], list[int]]] = {"trailing": _trailing, "leading": _leading}
SPACINGS = (*_TIMESTEPS, "karras")


def sampling_timesteps(timesteps: int, steps: int, spacing: str = "trailing") -> list[int]:
    """Return the `steps` timesteps to visit of a process that has `timesteps`, noisiest first.

    "trailing" is round(T - i T / N) - 1 for i = 0..N-1: it starts at the last timestep, where the images
    really are noise. "leading" is floor(i T / N): it ends at timestep 0 but starts up to T / N short of the
    last one, where the network expects traces of an image that pure noise has not (Lin et al. 2023, arXiv
    2305.08891, section 3.3).

    Raises:
        ValueError: if there are more steps than timesteps, or the spacing is unknown.
    """
    if spacing not in _TIMESTEPS:
        raise ValueError(f"no spacing named {spacing!r}; known: {', '.join(_TIMESTEPS)}")
    if steps > timesteps:
        numbers = f"sampling.steps = {steps} is more than diffusion.timesteps = {timesteps}"
        raise ValueError(f"{numbers}: lower the first or raise the second")
    return _TIMESTEPS[spacing](timesteps, steps)


def karras_sigmas(steps: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> list[float]:
    """Return `steps` noise levels from `sigma_max` to `sigma_min`, dense where the noise is low.

    Karras et al. 2022 (arXiv 2206.00364), eq. 5, without the final 0. A single step is at `sigma_max`.
    """
    if steps == 1:
        return [sigma_max]
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    inner = [(high + i / (steps - 1) * (low - high)) ** rho for i in range(1, steps - 1)]
    return [sigma_max, *inner, sigma_min]  # the ends exactly


@define(eq=False, frozen=True)
class Discrete:
    """Timesteps 0..T-1 with the tables of a schedule: variance-preserving, alpha² + sigma² = 1."""

    schedule: NoiseSchedule
    spacings = ("trailing", "leading", "karras")
    initial_scale = 1.0
    knows_image = straight = False

    @property
    def ends_in_noise(self) -> bool:
        """Whether the schedule has a zero terminal SNR."""
        return float(self.schedule.alphas_cumprod[-1]) == 0

    @cached_property
    def _log_ratios(self) -> Tensor:
        return self.schedule.log_snr / -2  # float64, rising

    def from_fraction(self, fraction: Tensor) -> Tensor:
        """Return floor(fraction * T): timesteps, int64."""
        return (fraction * len(self.schedule.betas)).long()  # a float32 below 1 times T is never rounded up to T

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the timesteps, int64, whose noise level is nearest on the log scale."""
        levels = self._log_ratios
        halfway = ((levels[1:] + levels[:-1]) / 2).to(log_ratio)
        return torch.bucketize(log_ratio, halfway)

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Look up the tables at the timesteps, int64."""
        alpha, sigma, log_snr = self.schedule.gather(_TABLES, times, ndim)
        return alpha, sigma, log_snr

    def network_time(self, times: Tensor) -> Tensor:
        """Return the timesteps as they are: bfloat16 would take 999 for 1000."""
        return times

    def points(self, steps: int, spacing: str, rho: float) -> list[Point]:
        """Visit timesteps ("trailing", "leading"), or noise levels between them ("karras")."""
        if spacing == "karras":
            low, high = self._log_ratios[[0, -1]].exp().tolist()
            return [self.at(sigma) for sigma in karras_sigmas(steps, low, high, rho)]
        visited = sampling_timesteps(len(self.schedule.betas), steps, spacing)
        # Floats from the float64 table: exact for every dtype, and nothing to fetch from a device.
        levels = self.schedule.alphas_cumprod[visited].tolist()
        return [Point(math.sqrt(a), math.sqrt(1 - a), t) for t, a in zip(visited, levels, strict=True)]

    def at(self, ratio: float) -> Point:
        """Return the rates for `ratio`, and a time between two timesteps, linear in the logarithm of the ratio."""
        levels, wanted = self._log_ratios, torch.tensor(math.log(ratio), dtype=torch.float64)
        upper = int(torch.bucketize(wanted, levels).clamp(1, max(1, len(levels) - 1)))
        low, high = levels[[upper - 1, min(upper, len(levels) - 1)]].tolist()
        share = (float(wanted) - low) / (high - low) if high > low else 0.0
        time = upper - 1 + min(max(share, 0.0), 1.0)
        nearest, alpha = round(time), 1 / math.sqrt(1 + ratio * ratio)
        at_timestep = abs(time - nearest) < 1e-9  # the logarithm has been rounded
        return Point(alpha, ratio * alpha, nearest if at_timestep else time)


@define(eq=False, frozen=True)
class Flow:
    """x_t = (1 - t) * x0 + t * noise for t from 0, the image, to 1 (Liu et al. 2022, arXiv 2209.03003).

    The network is told t * `time_scale`. A `time_shift` k moves times towards the noise, to k t / (1 + (k - 1) t):
    large images need it, as their neighbouring pixels tell of each other (Esser et al. 2024, arXiv 2403.03206).
    """

    time_shift: float = 1.0
    time_scale: float = 1000.0
    spacings = ("trailing",)
    initial_scale = 1.0
    ends_in_noise = knows_image = straight = True

    def shifted(self, time: Tensor) -> Tensor:
        """Return k t / (1 + (k - 1) t)."""
        return self.time_shift * time / (1 + (self.time_shift - 1) * time)

    def from_fraction(self, fraction: Tensor) -> Tensor:
        """Return the shifted times, in (0, 1)."""
        return self.shifted(fraction.clamp(_TINY, 1 - 2 * _TINY))

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the shifted times: t / (1 - t) is the ratio before the shift."""
        return self.from_fraction(log_ratio.sigmoid())

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return 1 - t, t, and the log-SNR, 2 ln((1 - t) / t)."""
        sigma = times.reshape(-1, *[1] * (ndim - 1))
        alpha = 1 - sigma
        return alpha, sigma, 2 * (alpha / sigma).log()

    def network_time(self, times: Tensor) -> Tensor:
        """Return t * `time_scale`."""
        return times * self.time_scale

    def points(self, steps: int, spacing: str, rho: float) -> list[Point]:
        """Visit `steps` times of equal distance, t = 1 first, and shift them."""
        times = torch.tensor([1 - i / steps for i in range(steps)], dtype=torch.float64)
        return [self._point(t) for t in self.shifted(times).tolist()]

    def at(self, ratio: float) -> Point:
        """Return the moment t = ratio / (1 + ratio)."""
        return self._point(ratio / (1 + ratio))

    def _point(self, time: float) -> Point:
        return Point(1 - time, time, time * self.time_scale)


@define(eq=False, frozen=True)
class VarianceExploding:
    """x_sigma = x0 + sigma * noise; times are the noise levels sigma (Karras et al. 2022, arXiv 2206.00364).

    The network is told c_noise = ln(sigma) / 4, times `time_scale`.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    time_scale: float = 1000.0
    spacings = ("karras",)
    ends_in_noise = knows_image = False
    straight = True

    @property
    def initial_scale(self) -> float:
        """`sigma_max`: next to it the image is nothing."""
        return self.sigma_max

    def from_fraction(self, fraction: Tensor) -> Tensor:
        """Return noise levels that are equally distant on the log scale, `sigma_min` to `sigma_max`."""
        low, high = math.log(self.sigma_min), math.log(self.sigma_max)
        return (low + (high - low) * fraction).exp()

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return exp(log_ratio)."""
        return log_ratio.exp()

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return 1, sigma, and the log-SNR, -2 ln(sigma)."""
        sigma = times.reshape(-1, *[1] * (ndim - 1))
        return torch.ones_like(sigma), sigma, -2 * sigma.log()

    def network_time(self, times: Tensor) -> Tensor:
        """Return ln(sigma) / 4 * `time_scale`."""
        return times.log() * (self.time_scale / 4)

    def points(self, steps: int, spacing: str, rho: float) -> list[Point]:
        """Visit `karras_sigmas`."""
        return [self.at(sigma) for sigma in karras_sigmas(steps, self.sigma_min, self.sigma_max, rho)]

    def at(self, ratio: float) -> Point:
        """Return the moment of noise level `ratio`."""
        return Point(1.0, ratio, math.log(ratio) * self.time_scale / 4)
