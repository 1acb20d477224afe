"""What a network predicts, and how to read the image and the noise off it.

Everything here is written in the two rates of x_t = alpha * x0 + sigma * noise. For a variance-preserving
process alpha is sqrt(alphas_cumprod) and sigma is sqrt(1 - alphas_cumprod); it is not DDPM's alpha, 1 - beta.
Both are passed, not alphas_cumprod, because 1 - alphas_cumprod cannot be had from a float32 near 1. A rate is
a float, or a tensor that broadcasts against the images (n 1 1 1) in their dtype; results have that dtype.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Rate = Tensor | float


def q_sample(x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
    """Return x_t, the noised image: Ho et al. 2020 (arXiv 2006.11239), eq. 4. All of shape n c h w."""
    return alpha * x0 + sigma * noise


def noise_from_x0(x_t: Tensor, x0: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
    """Return the noise that takes `x0` to `x_t`; the inverse of `q_sample`, for `sigma` above 0."""
    return (x_t - alpha * x0) / sigma


class Parametrization(Protocol):
    """A meaning of the network's output; `target` and `x0_and_noise` undo each other."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        """Return what the network should output for x_t = alpha * x0 + sigma * noise."""

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        """Return the image and the noise that `output` says `x_t` is made of."""


class Epsilon:
    """The output is the noise: Ho et al. 2020 (arXiv 2006.11239), eq. 11 to 14. Needs `alpha` above 0."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        """Return the noise itself."""
        return noise

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        """Return x0 = (x_t - sigma * output) / alpha, and the output itself."""
        return (x_t - sigma * output) / alpha, output


class VPrediction:
    """The output is v = alpha * noise - sigma * x0.

    Salimans & Ho 2022 (arXiv 2202.00512), section 4 and appendix D. (x0, noise) to (x_t, v) is a rotation, so
    this asks for alpha² + sigma² = 1.
    """

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        """Return v."""
        return alpha * noise - sigma * x0

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        """Return x0 = alpha * x_t - sigma * v and noise = sigma * x_t + alpha * v."""
        return alpha * x_t - sigma * output, sigma * x_t + alpha * output


# The names are those of diffusers' schedulers.
PREDICTION_TYPES: dict[str, Parametrization] = {"epsilon": Epsilon(), "v_prediction": VPrediction()}
