"""Loss weights of the noise levels.

A weighting is a weight on the squared error of x0, times sigma² so that it stays finite at sigma = 0. Divided by
`Prediction.error_ratio`, it is a weight on the output, which gives the same loss for every prediction. A formula for
one prediction is wrong for another: for v, min-SNR is min(SNR, gamma) / (SNR + 1), whereas
min(SNR + 1, gamma) / (SNR + 1) and min(SNR, gamma) / SNR + 1 are wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from attrs import define, evolve, field
from attrs.validators import ge, gt, optional
from torch import Tensor

from hookdiff.diffusion.prediction import Prediction
from hookdiff.options.choices import Choice
from hookdiff.options.fields import about


class Weighting(Choice, ABC):
    """The weight of the error at each noise level."""

    kind = "weighting"
    default = "uniform"
    sigma_data: float | None = None  # standard deviation of images that the weighting assumes; None: any

    @abstractmethod
    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the weight of each sample's error on the output of `prediction`, in the shape and dtype of `alpha`.

        `alpha`, at least 0, and `sigma`, above 0, are the rates of the samples, both of the same shape.
        """

    def fit(self, prediction: Prediction) -> Weighting:
        """Return this weighting, with its missing options filled in from `prediction`."""
        return self


@define(frozen=True)
class UniformWeighting(Weighting):
    """The weight 1 on the output, for every prediction."""

    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        return torch.ones_like(alpha)


class X0Weighting(Weighting):
    """A weighting that is defined on the squared error of x0."""

    @abstractmethod
    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return sigma² times the weight of the squared error of x0."""

    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        weight, ratio = self.on_x0(alpha, sigma), prediction.error_ratio(alpha, sigma)
        # At an SNR of 0 both may be 0; the limit is 1, as that of min(SNR, gamma) / SNR for "epsilon".
        return torch.where((weight == 0) & (ratio == 0), 1.0, weight / ratio)


@define(frozen=True)
class MinSNR(X0Weighting):
    """min(SNR, gamma) on x0: Hang et al. 2023 (arXiv 2303.09556)."""

    gamma: float = field(default=5.0, validator=gt(0), metadata=about("largest weight on x0"))

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        return torch.minimum(alpha * alpha, self.gamma * sigma * sigma)


@define(frozen=True)
class Debiased(X0Weighting):
    """1 / sqrt(min(SNR, 1000)) on the noise: Yu et al. 2023 (arXiv 2310.08442); the cap is customary."""

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        return torch.maximum(alpha * sigma, alpha * alpha * 1000**-0.5)


@define(frozen=True)
class P2(X0Weighting):
    """1 / (k + SNR)^gamma on the noise: Choi et al. 2022 (arXiv 2204.00227)."""

    k: float = field(default=1.0, validator=gt(0), metadata=about("k: pure noise has the weight 1 / k^gamma"))
    gamma: float = field(default=1.0, validator=ge(0), metadata=about("gamma: 0 weights all noise levels alike"))

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        # The powers of sigma are multiplied out, so that an infinite SNR gives a weight of 0 and no NaN.
        square = sigma * sigma
        return alpha * alpha * (square / (self.k * square + alpha * alpha)) ** self.gamma


@define(frozen=True)
class EDMWeighting(X0Weighting):
    """(sigma² + sigma_data²) / (sigma sigma_data)² on x0: Karras et al. 2022 (arXiv 2206.00364), table 1."""

    sigma_data: float | None = field(
        default=None,
        validator=optional(gt(0)),
        metadata=about('standard deviation of the images; default: that of prediction "edm", or 0.5'),
    )

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        return sigma * sigma / (self.sigma_data or 0.5) ** 2 + alpha * alpha

    def fit(self, prediction: Prediction) -> Weighting:
        return self if self.sigma_data else evolve(self, sigma_data=prediction.sigma_data or 0.5)


Weighting.known = {"uniform": UniformWeighting, "min_snr": MinSNR, "debiased": Debiased, "p2": P2, "edm": EDMWeighting}
