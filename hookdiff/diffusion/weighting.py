"""Loss weights: how much each noise level counts.

A weighting is a weight on the squared error of x0, times sigma² so that it stays finite where sigma is 0; divided by
`Prediction.error_ratio` it becomes one on the output. So it stands for the same loss whatever the network predicts.
Written down for one prediction and copied to another, it would not: min-SNR for v is min(SNR, gamma) / (SNR + 1), and
neither min(SNR + 1, gamma) / (SNR + 1) nor min(SNR, gamma) / SNR + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from attrs import define, evolve, field
from attrs.validators import ge, gt, optional
from torch import Tensor

from hookdiff.choices import Choice
from hookdiff.diffusion.prediction import Prediction


class Weighting(Choice, ABC):
    """How much the error at each noise level counts."""

    kind = "weighting"
    default = "uniform"

    @abstractmethod
    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the weight of each sample's error of the output of `prediction`: shape and dtype of `alpha`.

        `alpha`, at least 0, and `sigma`, above 0, are the rates of the samples, of any one shape.
        """

    def fit(self, prediction: Prediction) -> Weighting:
        """Return this weighting with the options that follow from `prediction`."""
        return self


@define(frozen=True)
class UniformWeighting(Weighting):
    """1 on what the network predicts, whatever that is."""

    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(alpha)


class X0Weighting(Weighting):
    """A weighting that is written down for the squared error of x0."""

    @abstractmethod
    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return sigma² times the weight of the squared error of x0."""

    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return what the weight on x0 is on the output.

        It is 1 where neither the weight on x0 nor the error ratio leaves anything, as in min(SNR, gamma) / SNR at a SNR
        of 0.
        """
        weight, ratio = self.on_x0(alpha, sigma), prediction.error_ratio(alpha, sigma)
        return torch.where((weight == 0) & (ratio == 0), 1.0, weight / ratio)


@define(frozen=True)
class MinSNR(X0Weighting):
    """min(SNR, gamma) on x0: Hang et al. 2023 (arXiv 2303.09556)."""

    gamma: float = field(default=5.0, validator=gt(0))

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return min(alpha², gamma sigma²)."""
        return torch.minimum(alpha * alpha, self.gamma * sigma * sigma)


@define(frozen=True)
class Debiased(X0Weighting):
    """1 / sqrt(min(SNR, 1000)) on the noise: Yu et al. 2023 (arXiv 2310.08442); the cap is customary."""

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return max(alpha sigma, alpha² / sqrt(1000))."""
        return torch.maximum(alpha * sigma, alpha * alpha * 1000**-0.5)


@define(frozen=True)
class P2(X0Weighting):
    """1 / (k + SNR)^gamma on the noise: Choi et al. 2022 (arXiv 2204.00227)."""

    k: float = field(default=1.0, validator=gt(0))
    gamma: float = field(default=1.0, validator=ge(0))

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return alpha² / (k + SNR)^gamma."""
        # The powers of sigma are multiplied out, so that a SNR without end is a weight of 0 and no NaN.
        square = sigma * sigma
        return alpha * alpha * (square / (self.k * square + alpha * alpha)) ** self.gamma


@define(frozen=True)
class EDMWeighting(X0Weighting):
    """(sigma² + sigma_data²) / (sigma sigma_data)² on x0: Karras et al. 2022 (arXiv 2206.00364), table 1."""

    # standard deviation of the images; unless given, that of prediction "edm", or 0.5
    sigma_data: float | None = field(default=None, validator=optional(gt(0)))

    def on_x0(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return sigma² / sigma_data² + alpha²."""
        return sigma * sigma / (self.sigma_data or 0.5) ** 2 + alpha * alpha

    def fit(self, prediction: Prediction) -> Weighting:
        """Take up the prediction's `sigma_data`."""
        return self if self.sigma_data else evolve(self, sigma_data=getattr(prediction, "sigma_data", 0.5))


Weighting.known = {
    "uniform": UniformWeighting,
    "min_snr": MinSNR,
    "debiased": Debiased,
    "p2": P2,
    "edm": EDMWeighting,
}


def to_weighting(value: Weighting | str) -> Weighting:
    """Return the weighting that `value` is, or names."""
    return Weighting.of(value)
