"""The kernel distance, called KID for features of Inception."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PAIRS = 1 << 23  # values of the kernel in memory at a time


def kernel_distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the squared maximum mean discrepancy of features (n d and m d) and its standard error.

    The kernel is (x y / d + 1)^3 (Binkowski et al. 2018, arXiv 1801.01401, section 4). The estimate is unbiased: it
    may be negative, and its mean does not depend on n as that of the Fréchet distance. All pairs are used. The paper's
    average over random subsets has the same mean, but a larger variance. The error is that of a U-statistic to first
    order in 1/n (Sutherland et al. 2017, arXiv 1611.04488, section 2).

    Raises:
        ValueError: for fewer than 2 samples in either set, or sets that differ in dimension.
    """
    n, m = len(a), len(b)
    if min(n, m) < 2:
        raise ValueError(f"the kernel distance needs at least 2 samples of each set, got {n} and {m}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"features of {a.shape[1]} and of {b.shape[1]} dimensions cannot be compared")
    a, b = a.double(), b.double()
    (in_a, _), (in_b, _), (across, back) = _sums(a, a), _sums(b, b), _sums(a, b)
    own_a, own_b = (_kernel(x.square().sum(dim=1), x.shape[1]) for x in (a, b))  # the kernel of each sample with itself
    left, right = (in_a - own_a) / (n - 1), (in_b - own_b) / (m - 1)
    distance = left.mean() + right.mean() - 2 * (across / m).mean()
    # For each sample, the mean kernel with its own set minus the mean kernel with the other set.
    error = 4 * ((left - across / m).var() / n + (right - back / n).var() / m)
    return float(distance), math.sqrt(float(error))


def _sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the kernel over `b` for each row of `a` (n), and over `a` for each row of `b` (m)."""
    rows, columns = [], b.new_zeros(len(b))
    for part in torch.split(a, max(1, _PAIRS // len(b))):
        kernel = _kernel(part @ b.T, a.shape[1])
        rows.append(kernel.sum(dim=1))
        columns += kernel.sum(dim=0)
    return torch.cat(rows), columns


def _kernel(products: Tensor, dim: int) -> Tensor:
    return (products / dim + 1).pow(3)
