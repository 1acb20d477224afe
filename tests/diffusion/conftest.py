"""The best possible network for data whose pixels are independent and Gaussian: everything it does is closed form."""

from __future__ import annotations

import pytest
import torch
from attrs import define
from torch import Tensor

from hookdiff.diffusion import Diffusion, Discrete, Flow


@define(eq=False)
class Gaussian:
    """Sees in x_t what N(mu, s²) data leaves to be seen, and says it as the objective's prediction type wants it.

    It gets only what a network gets, and finds alpha and sigma from the time that it is told: so what is told is
    under test too.
    """

    diffusion: Diffusion
    mu: float = 0.0
    s: float = 1.0

    def rates(self, told: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma, n 1 1 1 in float64."""
        process, told = self.diffusion.process, told.view(-1, 1, 1, 1)
        if isinstance(process, Flow):
            sigma = told.double() / process.time_scale
            return 1 - sigma, sigma
        if not isinstance(process, Discrete):
            sigma = (told.double() * (4 / self.diffusion.time_scale)).exp()
            return torch.ones_like(sigma), sigma
        table = process.schedule
        if told.dtype == torch.int64:
            return table.sqrt_alphas_cumprod[told], table.sqrt_one_minus_alphas_cumprod[told]
        below = told.floor().long().clamp(max=len(table.betas) - 2)
        log_ratio = torch.lerp(table.log_snr[below], table.log_snr[below + 1], told.double() - below) / -2
        return (1 + (2 * log_ratio).exp()).rsqrt(), (1 + (-2 * log_ratio).exp()).rsqrt()

    def __call__(self, shown: Tensor, told: Tensor, labels: Tensor | None = None) -> Tensor:
        (alpha, sigma), kind = self.rates(told), self.diffusion.parametrization
        x = shown.double() / kind.network_input(torch.ones_like(alpha), alpha, sigma)
        y = (x - alpha * self.mu) / ((alpha * self.s) ** 2 + sigma**2)
        return kind.target(self.mu + alpha * self.s**2 * y, sigma * y, alpha, sigma).to(shown.dtype)


@pytest.fixture(scope="session")
def gaussian() -> type[Gaussian]:
    return Gaussian
