"""Noise schedules: how much of the image is left, and how much noise is in it, at every timestep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from attrs import Attribute, define, field
from torch import Tensor


def linear_betas(timesteps: int, beta_start: float = 1e-4, beta_end: float = 0.02) -> Tensor:
    """Betas that grow linearly, as in Ho et al. 2020 (arXiv 2006.11239), section 4.

    The ends are the same for every number of `timesteps`, as in diffusers; guided-diffusion scales them
    by 1000 / timesteps instead. So with far fewer than 1000 timesteps the last one is far from pure noise:
    use the cosine schedule there.

    Returns:
        float64 of shape `timesteps`, on the CPU.
    """
    return torch.linspace(beta_start, beta_end, timesteps, dtype=torch.float64, device="cpu")


def scaled_linear_betas(timesteps: int, beta_start: float = 0.00085, beta_end: float = 0.012) -> Tensor:
    """Betas whose square roots grow linearly, as in Stable Diffusion (Rombach et al. 2022, arXiv 2112.10752).

    The default ends are those of its releases.

    Returns:
        float64 of shape `timesteps`, on the CPU.
    """
    return torch.linspace(beta_start**0.5, beta_end**0.5, timesteps, dtype=torch.float64, device="cpu").square()


def sigmoid_betas(timesteps: int, beta_start: float = 1e-4, beta_end: float = 0.02) -> Tensor:
    """Betas that rise from one end to the other as a sigmoid over [-6, 6] does.

    That of GeoDiff (Xu et al. 2022, arXiv 2203.02923), as in diffusers.

    Returns:
        float64 of shape `timesteps`, on the CPU.
    """
    rise = torch.linspace(-6, 6, timesteps, dtype=torch.float64, device="cpu").sigmoid()
    return beta_start + (beta_end - beta_start) * rise


def cosine_betas(timesteps: int, offset: float = 0.008, max_beta: float = 0.999) -> Tensor:
    """Betas whose alphas_cumprod follow a squared cosine.

    Nichol & Dhariwal 2021 (arXiv 2102.09672), eq. 17. `max_beta` keeps the last timestep, where the cosine
    is zero, from losing the image altogether.

    Returns:
        float64 of shape `timesteps`, on the CPU.
    """
    time = torch.arange(timesteps + 1, dtype=torch.float64, device="cpu") / timesteps
    remaining = torch.cos((time + offset) / (1 + offset) * torch.pi / 2).square()
    return (1 - remaining[1:] / remaining[:-1]).clamp(max=max_beta)


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


BETAS: dict[str, Callable[..., Tensor]] = {
    "linear": linear_betas,
    "scaled_linear": scaled_linear_betas,
    "cosine": cosine_betas,
    "sigmoid": sigmoid_betas,
}


def make_schedule(
    name: str,
    timesteps: int,
    beta_start: float | None = None,
    beta_end: float | None = None,
    *,
    zero_snr: bool = False,
) -> NoiseSchedule:
    """Return the schedule called `name` in BETAS, with `timesteps` (1 or more) timesteps.

    Args:
        name: "linear", "scaled_linear", "cosine" or "sigmoid".
        timesteps: their number.
        beta_start: the first beta, between 0 and 1; None is the schedule's own. The cosine has none.
        beta_end: the last beta, in the same way.
        zero_snr: apply `rescale_betas_zero_snr`.

    Raises:
        ValueError: if the name is unknown, `timesteps` is below 1 (2 with `zero_snr`), or a beta leaves its range.
    """
    if name not in BETAS:
        raise ValueError(f"no noise schedule named {name!r}; known: {', '.join(BETAS)}")
    if timesteps < 1:
        raise ValueError(f"a noise schedule needs at least 1 timestep, got {timesteps}")
    ends = {"beta_start": beta_start, "beta_end": beta_end}
    betas = BETAS[name](timesteps, **{end: beta for end, beta in ends.items() if beta is not None})
    return NoiseSchedule(rescale_betas_zero_snr(betas) if zero_snr else betas)
