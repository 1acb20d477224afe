"""Predictions: the meaning of the network's output, and the image and the noise that follow from it.

Everything here is written in the two rates of x_t = alpha * x0 + sigma * noise. For a variance-preserving
process alpha is sqrt(alphas_cumprod) and sigma is sqrt(1 - alphas_cumprod); it is not DDPM's alpha, 1 - beta.
Both are passed, because 1 - alphas_cumprod loses its digits in float32 where alphas_cumprod is near 1. A rate is a
float, or a tensor that broadcasts against the images (n 1 1 1) in their dtype; results have that dtype.
"""

from abc import ABC, abstractmethod
from typing import Any

from attrs import define, field
from attrs.validators import gt
from torch import Tensor

from hookdiff.options.choices import Choice
from hookdiff.options.fields import about

Rate = Tensor | float


def q_sample(x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
    """Return x_t, the noised image: Ho et al. 2020 (arXiv 2006.11239), eq. 4. All of shape n c h w."""
    return alpha * x0 + sigma * noise


def noise_from_x0(x_t: Tensor, x0: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
    """Return the noise that takes `x0` to `x_t`; the inverse of `q_sample`, for `sigma` above 0."""
    return (x_t - alpha * x0) / sigma


class Prediction(Choice, ABC):
    """A meaning of the network's output; `x0_and_noise` is the inverse of `target`."""

    kind = "prediction"
    needs_alpha = False  # x0 cannot be derived from the output at alpha = 0 (pure noise)
    needs_sigma = False  # the noise cannot be derived from the output at sigma = 0 (no noise)
    sigma_data: float | None = None  # standard deviation of images that the prediction assumes; None: any

    def network_input(self, x_t: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        """Return the input of the network: x_t itself, unless the prediction scales it."""
        return x_t

    @abstractmethod
    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        """Return the target for the network's output at x_t = alpha * x0 + sigma * noise."""

    @abstractmethod
    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        """Return the image and the noise of `x_t` according to `output`."""

    @abstractmethod
    def error_ratio(self, alpha: Rate, sigma: Rate) -> Rate:
        """Return sigma² r, where r is the squared error of the output over the squared error of its x0.

        A loss on the output weighs the squared error of x0 by r. The factor sigma² keeps results finite at sigma = 0.
        """

    def check(self, process: Any) -> None:
        """Raise ValueError, naming `prediction`, if the prediction cannot be used with the process (`Process`)."""
        if self.needs_alpha and process.ends_in_noise:
            raise ValueError(
                f"'prediction' cannot be {self.use!r}: this process ends in pure noise, where the image does not "
                "follow from the output; use 'v_prediction', 'flow_prediction', 'sample' or 'edm', or process 'ddpm'"
            )


@define(frozen=True)
class Epsilon(Prediction):
    """The output is the noise: Ho et al. 2020 (arXiv 2006.11239), eq. 11 to 14."""

    needs_alpha = True

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        return noise

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        return (x_t - sigma * output) / alpha, output

    def error_ratio(self, alpha: Rate, sigma: Rate) -> Rate:
        return alpha * alpha


@define(frozen=True)
class SamplePrediction(Prediction):
    """The output is the image, x0."""

    needs_sigma = True

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        return x0

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        return output, noise_from_x0(x_t, output, alpha, sigma)

    def error_ratio(self, alpha: Rate, sigma: Rate) -> Rate:
        return sigma * sigma


@define(frozen=True)
class VPrediction(Prediction):
    """The output is v = alpha noise - sigma x0: Salimans & Ho 2022 (arXiv 2202.00512), section 4 and appendix D.

    If alpha² + sigma² = 1, the map from (x0, noise) to (x_t, v) is a rotation.
    """

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        return alpha * noise - sigma * x0

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        square = alpha * alpha + sigma * sigma
        return (alpha * x_t - sigma * output) / square, (sigma * x_t + alpha * output) / square

    def error_ratio(self, alpha: Rate, sigma: Rate) -> Rate:
        square = alpha * alpha + sigma * sigma
        return square * square


@define(frozen=True)
class FlowPrediction(Prediction):
    """The output is the velocity u = noise - x0: Lipman et al. 2022 (arXiv 2210.02747), Liu et al. 2022 (2209.03003).

    u is the time derivative of x_t = (1 - t) x0 + t noise. Noise is at t = 1 here, so u points from the image to the
    noise; some papers have both the other way round.
    """

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        return noise - x0

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        total = alpha + sigma
        return (x_t - sigma * output) / total, (x_t + alpha * output) / total

    def error_ratio(self, alpha: Rate, sigma: Rate) -> Rate:
        total = alpha + sigma
        return total * total


@define(frozen=True)
class EDMPrediction(Prediction):
    """The network's input and output have unit variance (EDM): Karras et al. 2022 (arXiv 2206.00364), section 5.

    The image is x0 = c_skip x_t / alpha + c_out F, with the output F for the input c_in x_t / alpha; table 1 has the
    factors for alpha = 1. For another alpha they apply to x_t / alpha, which has the noise level sigma / alpha. The
    formulas here hold for alpha = 0 too.
    """

    sigma_data: float = field(default=0.5, validator=gt(0), metadata=about("standard deviation of the images"))

    def _variance(self, alpha: Rate, sigma: Rate) -> Rate:
        return sigma * sigma + self.sigma_data**2 * (alpha * alpha)  # of x_t

    def network_input(self, x_t: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        return x_t / self._variance(alpha, sigma) ** 0.5

    def target(self, x0: Tensor, noise: Tensor, alpha: Rate, sigma: Rate) -> Tensor:
        # x0 - c_skip x_t / alpha = sigma * difference / variance of x_t. Dividing it by c_out cancels the sigma, which
        # avoids 0 / 0.
        difference = sigma * x0 - (self.sigma_data**2 * alpha) * noise
        return difference / (self.sigma_data * self._variance(alpha, sigma) ** 0.5)

    def x0_and_noise(self, output: Tensor, x_t: Tensor, alpha: Rate, sigma: Rate) -> tuple[Tensor, Tensor]:
        variance = self._variance(alpha, sigma)
        skip, out = self.sigma_data**2 * alpha / variance, self.sigma_data * sigma / variance**0.5
        x0 = skip * x_t + out * output
        # (x_t - alpha * x0) / sigma, with the sigma cancelled
        noise = (sigma / variance) * x_t - (self.sigma_data * alpha / variance**0.5) * output
        return x0, noise

    def error_ratio(self, alpha: Rate, sigma: Rate) -> Rate:
        return self._variance(alpha, sigma) / self.sigma_data**2


# The names are those of diffusers' schedulers, where these have them.
Prediction.known = {
    "epsilon": Epsilon,
    "sample": SamplePrediction,
    "v_prediction": VPrediction,
    "flow_prediction": FlowPrediction,
    "edm": EDMPrediction,
}
