"""Gaussian data, for which the best network, its samples and the probability flow are known in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gaussian_prediction(x: Any, alpha: Any, sigma: Any, mean: Any, std: Any) -> tuple[Any, Any]:
    """Return the image and the noise that the best network for pixels from N(mean, std²) predicts.

    They are E[x0 | x_t] = mean + alpha std² y and E[noise | x_t] = sigma y, with

        y = (x_t - alpha mean) / (alpha² std² + sigma²)

    Args:
        x: x_t = alpha x0 + sigma noise, of any shape; all arguments are numbers or tensors.
        alpha: rate of the image.
        sigma: rate of the noise.
        mean: mean of the pixels.
        std: standard deviation of the pixels.
    """
    y = (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
    return mean + alpha * std**2 * y, sigma * y


def gaussian_flow(x: Tensor, start: tuple[float, float], end: tuple[float, float], mean: float, std: float) -> Tensor:
    """Return the end point of the probability flow that starts at `x`, for pixels from N(mean, std²).

    `start` and `end` are pairs (alpha, sigma). Along the flow, (x_t - alpha mean) / sqrt(alpha² std² + sigma²) is
    constant (Karras et al. 2022, arXiv 2206.00364, eq. 4, for a Gaussian).
    """
    (a, s), (a_end, s_end) = start, end
    grown = ((a_end**2 * std**2 + s_end**2) / (a**2 * std**2 + s**2)) ** 0.5
    moved: Tensor = a_end * mean + grown * (x - a * mean)
    return moved


def normal_quantiles(num: int) -> Tensor:
    """Return the quantiles of N(0, 1) at (k + 1/2) / `num`, for k from 0 to `num` - 1, in rising order, float64."""
    middles = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    quantiles: Tensor = torch.special.ndtri(middles)
    return quantiles
