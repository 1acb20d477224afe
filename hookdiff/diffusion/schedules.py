"""Noise schedules: the rates of image and noise at every timestep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import Attribute, define, field
from torch import Tensor

from hookdiff.options.choices import Choice
from hookdiff.options.fields import about, between

_BETA = between(0, 1, open_ends=True)
_FIRST = about("first beta")
_LAST = about("last beta; it does not depend on the number of timesteps")


class Schedule(Choice, ABC):
    """The variance of the noise that each timestep adds."""

    kind = "schedule"

    @abstractmethod
    def betas(self, timesteps: int) -> Tensor:
        """Return beta at each of `timesteps` (1 or more), between 0 and 1: float64 of shape `timesteps`, on the CPU."""


@define(frozen=True)
class Linear(Schedule):
    """Betas that grow linearly: Ho et al. 2020 (arXiv 2006.11239), section 4.

    Both ends are the same for every number of timesteps, as in diffusers; guided-diffusion scales them by 1000 / T.
    """

    beta_start: float = field(default=1e-4, validator=_BETA, metadata=_FIRST)
    beta_end: float = field(default=0.02, validator=_BETA, metadata=_LAST)

    def betas(self, timesteps: int) -> Tensor:
        return torch.linspace(self.beta_start, self.beta_end, timesteps, dtype=torch.float64, device="cpu")


@define(frozen=True)
class ScaledLinear(Schedule):
    """Betas with square roots that grow linearly, as in Stable Diffusion: Rombach et al. 2022 (arXiv 2112.10752).

    The default betas are those of the released models.
    """

    beta_start: float = field(default=0.00085, validator=_BETA, metadata=_FIRST)
    beta_end: float = field(default=0.012, validator=_BETA, metadata=_LAST)

    def betas(self, timesteps: int) -> Tensor:
        ends = self.beta_start**0.5, self.beta_end**0.5
        return torch.linspace(*ends, timesteps, dtype=torch.float64, device="cpu").square()


@define(frozen=True)
class Cosine(Schedule):
    """Betas with alphas_cumprod that follow a squared cosine: Nichol & Dhariwal 2021 (arXiv 2102.09672), eq. 17."""

    offset: float = field(
        default=0.008, validator=between(0, 1), metadata=about("offset that keeps the first betas from being tiny")
    )
    max_beta: float = field(default=0.999, validator=_BETA, metadata=about("largest beta"))

    def betas(self, timesteps: int) -> Tensor:
        time = torch.arange(timesteps + 1, dtype=torch.float64, device="cpu") / timesteps
        remaining = torch.cos((time + self.offset) / (1 + self.offset) * torch.pi / 2).square()
        return (1 - remaining[1:] / remaining[:-1]).clamp(max=self.max_beta)


@define(frozen=True)
class Sigmoid(Schedule):
    """Betas that rise as a sigmoid over [-6, 6], as in diffusers: GeoDiff, Xu et al. 2022 (arXiv 2203.02923)."""

    beta_start: float = field(default=1e-4, validator=_BETA, metadata=_FIRST)
    beta_end: float = field(default=0.02, validator=_BETA, metadata=_LAST)

    def betas(self, timesteps: int) -> Tensor:
        rise = torch.linspace(-6, 6, timesteps, dtype=torch.float64, device="cpu").sigmoid()
        return self.beta_start + (self.beta_end - self.beta_start) * rise


Schedule.known = {"linear": Linear, "scaled_linear": ScaledLinear, "cosine": Cosine, "sigmoid": Sigmoid}


def rescale_betas_zero_snr(betas: Tensor) -> Tensor:
    """Return `betas` (float64, T >= 2) rescaled to zero terminal SNR; the last one becomes 1.

    sqrt(alphas_cumprod) is shifted to end at 0 and scaled to begin where it did: Lin et al. 2023 (arXiv 2305.08891),
    algorithm 1. Raises ValueError for a single timestep.
    """
    if len(betas) < 2:
        raise ValueError("a zero terminal SNR needs at least 2 timesteps")
    root = (1 - betas).cumprod(0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    remaining = ((root - last) * (first / (first - last))).square()
    return torch.cat([betas[:1], 1 - remaining[1:] / remaining[:-1]])


def _as_table(values: Tensor | Sequence[float]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu")


@define(eq=False, frozen=True)
class NoiseSchedule:
    """The tables of a discrete diffusion process, derived from its betas.

    Every table is float64 on the CPU, of shape T, and indexed by the timestep: 0 is the least noisy, T - 1 the most.
    The names are the usual ones: alpha_t = 1 - beta_t, and x_t = sqrt_alphas_cumprod[t] * x_0 +
    sqrt_one_minus_alphas_cumprod[t] * noise (Ho et al. 2020, arXiv 2006.11239, eq. 4).

    `betas` (T) are the variances of the added noise, between 0 and 1, both excluded. The last may be 1: then the image
    is gone, and `log_snr` ends at minus infinity. Raises ValueError for other betas.
    """

    betas: Tensor = field(converter=_as_table)
    _on_device: dict[tuple[torch.device, int], Tensor] = field(init=False, factory=dict, repr=False)

    @betas.validator
    def _check_betas(self, attribute: Attribute[Tensor], betas: Tensor) -> None:
        if betas.ndim != 1 or not len(betas):
            raise ValueError(f"betas must be a list of numbers, not a tensor of shape {tuple(betas.shape)}")
        if not ((betas > 0) & (betas < 1))[:-1].all() or not 0 < betas[-1] <= 1:
            raise ValueError(f"betas must lie between 0 and 1, got {betas.min():g} to {betas.max():g}")

    @cached_property
    def alphas_cumprod(self) -> Tensor:
        """Share of the image in the variance of x_t: strictly decreasing, below 1; only the last may be 0."""
        return (1 - self.betas).cumprod(0)

    @cached_property
    def sqrt_alphas_cumprod(self) -> Tensor:
        """The factor of x_0 in x_t."""
        return self.alphas_cumprod.sqrt()

    @cached_property
    def sqrt_one_minus_alphas_cumprod(self) -> Tensor:
        """The factor of the noise in x_t."""
        return (1 - self.alphas_cumprod).sqrt()

    @cached_property
    def snr(self) -> Tensor:
        """Signal-to-noise ratio, alphas_cumprod / (1 - alphas_cumprod)."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @cached_property
    def log_snr(self) -> Tensor:
        """Natural logarithm of the signal-to-noise ratio."""
        return self.snr.log()

    def rates(self, timesteps: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return both factors and the log-SNR at `timesteps` (n, int64, 0 to T - 1), on their device.

        Each is float32 of shape n 1 1 ... (`ndim` axes), ready to multiply a batch.
        """
        key = timesteps.device, ndim
        if key not in self._on_device:
            # The tables are computed in float64, since 1 - alphas_cumprod in float32 is off by 2e-4 at the first
            # timesteps. They are float32 before the move, because some devices (mps) have no float64. The copy is
            # kept, because a copy in each step would make the host wait for the device.
            tables = torch.stack([self.sqrt_alphas_cumprod, self.sqrt_one_minus_alphas_cumprod, self.log_snr])
            self._on_device[key] = tables.float().to(timesteps.device).view(3, -1, *[1] * (ndim - 1))
        alpha, sigma, log_snr = self._on_device[key].index_select(1, timesteps).unbind()
        return alpha, sigma, log_snr
