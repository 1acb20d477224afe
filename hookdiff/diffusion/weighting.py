"""Loss weights: how much each noise level counts.

A weighting is a weight on the squared error of x0, times sigma² so that it stays finite where sigma is 0; divided by
`Parametrization.error_ratio` it becomes one on the output. So it stands for the same loss whatever the network
predicts. It is not the same where it was written down for one prediction and copied to another: min-SNR for
v is min(SNR, gamma) / (SNR + 1), and neither min(SNR + 1, gamma) / (SNR + 1) nor min(SNR, gamma) / SNR + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookdiff.diffusion.parametrization import Parametrization

Weighting = Callable[..., Tensor]  # (alpha, sigma, the options by name) -> sigma² times the weight on x0


def min_snr(alpha: Tensor, sigma: Tensor, *, snr_gamma: float, **_: Any) -> Tensor:
    """min(SNR, gamma) on x0: Hang et al. 2023 (arXiv 2303.09556)."""
    return torch.minimum(alpha * alpha, snr_gamma * sigma * sigma)


def debiased(alpha: Tensor, sigma: Tensor, **_: Any) -> Tensor:
    """1 / sqrt(min(SNR, 1000)) on the noise: Yu et al. 2023 (arXiv 2310.08442); the cap is customary."""
    return torch.maximum(alpha * sigma, alpha * alpha * 1000**-0.5)


def p2(alpha: Tensor, sigma: Tensor, *, p2_k: float, p2_gamma: float, **_: Any) -> Tensor:
    """1 / (k + SNR)^gamma on the noise: Choi et al. 2022 (arXiv 2204.00227)."""
    # The powers of sigma are multiplied out, so that a SNR without end is a weight of 0 and no NaN.
    square = sigma * sigma
    return alpha * alpha * (square / (p2_k * square + alpha * alpha)) ** p2_gamma


def edm(alpha: Tensor, sigma: Tensor, *, sigma_data: float, **_: Any) -> Tensor:
    """(sigma² + sigma_data²) / (sigma * sigma_data)² on x0: Karras et al. 2022 (arXiv 2206.00364), table 1."""
    return sigma * sigma / sigma_data**2 + alpha * alpha


WEIGHTINGS: dict[str, Weighting | None] = {
    "uniform": None,  # 1 on what the network predicts, whatever that is
    "min_snr": min_snr,
    "debiased": debiased,
    "p2": p2,
    "edm": edm,
}


def loss_weights(name: str, predicted: Parametrization, alpha: Tensor, sigma: Tensor, **options: float) -> Tensor:
    """Return the weight of each sample's squared error, of the output of `predicted`.

    Args:
        name: one of WEIGHTINGS.
        predicted: what the network predicts.
        alpha: rates of the samples, any shape, at least 0.
        sigma: the same, above 0.
        options: snr_gamma, p2_k, p2_gamma and sigma_data; each weighting reads its own.

    Returns:
        the shape and dtype of `alpha`; 1 where neither the weight on x0 nor the error ratio leaves anything, as in
        min(SNR, gamma) / SNR at a SNR of 0.
    """
    weighting = WEIGHTINGS[name]
    if weighting is None:
        return torch.ones_like(alpha)
    weight, ratio = weighting(alpha, sigma, **options), predicted.error_ratio(alpha, sigma)
    return torch.where((weight == 0) & (ratio == 0), 1.0, weight / ratio)
