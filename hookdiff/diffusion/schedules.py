"""Noise schedules: how much of the image is left, and how much noise is in it, at every timestep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import Attribute, define, field
from torch import Tensor

from hookdiff.choices import Choice
from hookdiff.options import between

_BETA = between(0, 1, open_ends=True)


class Schedule(Choice, ABC):
    """The variance of the noise that each timestep adds."""

    kind = "schedule"
    default = "linear"

    @abstractmethod
    def betas(self, timesteps: int) -> Tensor:
        """Return beta at each of `timesteps` (1 or more), between 0 and 1: float64 of shape `timesteps`, on the CPU."""


@define(frozen=True)
class Linear(Schedule):
    """Betas that grow linearly: Ho et al. 2020 (arXiv 2006.11239), section 4.

    The ends are the same for every number of timesteps, as in diffusers; guided-diffusion scales them by 1000 / T.
    """

    beta_start: float = field(default=1e-4, validator=_BETA)  # the first
    beta_end: float = field(default=0.02, validator=_BETA)  # the last

    def betas(self, timesteps: int) -> Tensor:
        """Return a straight line."""
        return torch.linspace(self.beta_start, self.beta_end, timesteps, dtype=torch.float64, device="cpu")


@define(frozen=True)
class ScaledLinear(Schedule):
    """Betas whose square roots grow linearly, as in Stable Diffusion (Rombach et al. 2022, arXiv 2112.10752).

    The default ends are those of its releases.
    """

    beta_start: float = field(default=0.00085, validator=_BETA)  # the first
    beta_end: float = field(default=0.012, validator=_BETA)  # the last

    def betas(self, timesteps: int) -> Tensor:
        """Return the squares of a straight line."""
        ends = self.beta_start**0.5, self.beta_end**0.5
        return torch.linspace(*ends, timesteps, dtype=torch.float64, device="cpu").square()


@define(frozen=True)
class Sigmoid(Schedule):
    """Betas that rise as a sigmoid over [-6, 6]: GeoDiff (Xu et al. 2022, arXiv 2203.02923), as in diffusers."""

    beta_start: float = field(default=1e-4, validator=_BETA)  # the first
    beta_end: float = field(default=0.02, validator=_BETA)  # the last

    def betas(self, timesteps: int) -> Tensor:
        """Return the sigmoid, scaled to the two ends."""
        rise = torch.linspace(-6, 6, timesteps, dtype=torch.float64, device="cpu").sigmoid()
        return self.beta_start + (self.beta_end - self.beta_start) * rise


@define(frozen=True)
class Cosine(Schedule):
    """Betas whose alphas_cumprod follow a squared cosine: Nichol & Dhariwal 2021 (arXiv 2102.09672), eq. 17."""

    offset: float = field(default=0.008, validator=between(0, 1))  # keeps the first betas from being tiny
    max_beta: float = field(default=0.999, validator=_BETA)  # the last one would be 1 and lose the image altogether

    def betas(self, timesteps: int) -> Tensor:
        """Return what the ratio of neighbouring squared cosines takes away."""
        time = torch.arange(timesteps + 1, dtype=torch.float64, device="cpu") / timesteps
        remaining = torch.cos((time + self.offset) / (1 + self.offset) * torch.pi / 2).square()
        return (1 - remaining[1:] / remaining[:-1]).clamp(max=self.max_beta)


Schedule.known = {"linear": Linear, "scaled_linear": ScaledLinear, "cosine": Cosine, "sigmoid": Sigmoid}


def to_schedule(value: Schedule | str) -> Schedule:
    """Return the schedule that `value` is, or names."""
    return Schedule.of(value)


def rescale_betas_zero_snr(betas: Tensor) -> Tensor:
    """Return betas that leave nothing of the image at the last timestep.

    Lin et al. 2023 (arXiv 2305.08891), algorithm 1: sqrt(alphas_cumprod) is shifted to end at 0 and scaled to begin
    where it did. The last beta is then 1.

    Args:
        betas: float64 of shape T, at least 2.

    Raises:
        ValueError: if there is only one timestep, which would have to be both ends.
    """
    if len(betas) < 2:
        raise ValueError("a zero terminal SNR takes at least 2 timesteps")
    root = (1 - betas).cumprod(0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    remaining = ((root - last) * (first / (first - last))).square()
    return torch.cat([betas[:1], 1 - remaining[1:] / remaining[:-1]])


def _as_table(values: Tensor | Sequence[float]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu")


@define(eq=False, frozen=True)
class NoiseSchedule:
    """The tables of a discrete diffusion process, derived from its betas.

    Every table is float64 on the CPU, of shape T, and indexed by the timestep: 0 is the least noisy, T - 1
    the most. Names are those of the field: alpha_t = 1 - beta_t, and x_t = sqrt_alphas_cumprod[t] * x_0 +
    sqrt_one_minus_alphas_cumprod[t] * noise (Ho et al. 2020, arXiv 2006.11239, eq. 4). Training reads the
    tables through `gather`.

    Args:
        betas: variance of the noise added at each timestep, between 0 and 1 (both excluded), shape T. The last may
            be 1: nothing of the image is left then, and `log_snr` ends at minus infinity.

    Raises:
        ValueError: if `betas` is empty, is not one-dimensional, or leaves its range.
    """

    betas: Tensor = field(converter=_as_table)
    _float32: dict[tuple[tuple[str, ...], torch.device], Tensor] = field(init=False, factory=dict, repr=False)

    @betas.validator
    def _check_betas(self, attribute: Attribute[Tensor], betas: Tensor) -> None:
        if betas.ndim != 1 or not len(betas):
            raise ValueError(f"betas must be a list of numbers, not a tensor of shape {tuple(betas.shape)}")
        if not ((betas > 0) & (betas < 1))[:-1].all() or not 0 < betas[-1] <= 1:
            raise ValueError(f"betas must lie between 0 and 1, got {betas.min():g} to {betas.max():g}")

    @cached_property
    def alphas_cumprod(self) -> Tensor:
        """Share of the image in the variance of x_t: strictly decreasing, below 1; 0 at most at the last timestep."""
        return (1 - self.betas).cumprod(0)

    @cached_property
    def alphas_cumprod_prev(self) -> Tensor:
        """The same one timestep earlier; 1 at timestep 0."""
        return torch.cat([self.alphas_cumprod.new_ones(1), self.alphas_cumprod[:-1]])

    @cached_property
    def sqrt_alphas_cumprod(self) -> Tensor:
        """What x_0 is multiplied with in x_t."""
        return self.alphas_cumprod.sqrt()

    @cached_property
    def sqrt_one_minus_alphas_cumprod(self) -> Tensor:
        """What the noise is multiplied with in x_t."""
        return (1 - self.alphas_cumprod).sqrt()

    @cached_property
    def snr(self) -> Tensor:
        """Signal-to-noise ratio, alphas_cumprod / (1 - alphas_cumprod)."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @cached_property
    def log_snr(self) -> Tensor:
        """Natural logarithm of the signal-to-noise ratio."""
        return self.snr.log()

    @cached_property
    def posterior_variance(self) -> Tensor:
        """Variance of x_{t-1} given x_t and x_0 (Ho et al. 2020, eq. 7); 0 at timestep 0."""
        return self.betas * (1 - self.alphas_cumprod_prev) / (1 - self.alphas_cumprod)

    @cached_property
    def posterior_mean_coef1(self) -> Tensor:
        """Weight of x_0 in the mean of x_{t-1} given x_t and x_0 (Ho et al. 2020, eq. 7)."""
        return self.betas * self.alphas_cumprod_prev.sqrt() / (1 - self.alphas_cumprod)

    @cached_property
    def posterior_mean_coef2(self) -> Tensor:
        """Weight of x_t in the same mean."""
        return (1 - self.alphas_cumprod_prev) * (1 - self.betas).sqrt() / (1 - self.alphas_cumprod)

    def gather(self, names: tuple[str, ...], timesteps: Tensor, ndim: int = 1) -> tuple[Tensor, ...]:
        """Return the values of several tables at `timesteps`, in float32 and ready to multiply a batch.

        Args:
            names: any tables of this class, such as ("alphas_cumprod", "log_snr").
            timesteps: int64 of shape n, each in 0..T-1, on any device.
            ndim: number of axes of the results.

        Returns:
            for each name float32 of shape n 1 1 ... (`ndim` axes), on the device of `timesteps`.
        """
        key = names, timesteps.device
        if key not in self._float32:
            # float32 only now that all is computed: 1 - alphas_cumprod would be off by 2e-4 at first.
            # Before the move, as some devices (mps) hold no float64. And kept there, because a copy a step
            # would make the host wait for the device.
            tables: list[Tensor] = [getattr(self, name) for name in names]
            self._float32[key] = torch.stack(tables).float().to(timesteps.device)
        return self._float32[key][:, timesteps].reshape(len(names), -1, *[1] * (ndim - 1)).unbind()
