"""The Fréchet distance between two sets of features, exact up to rounding and never imaginary."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from hookdiff.features.moments import Gaussian, Moments

_MANY = 2000  # number of images below which the bias of the distance is large
_EPS = torch.finfo(torch.float64).eps
_NEAR = 1e-3  # share of the variances below which too many digits of their difference cancel
_DIGITS = 1e-11  # largest relative error of the fast way


def frechet_distance(a: Moments | Gaussian, b: Moments | Gaussian) -> float:
    """Return `|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))`, in the units of the features squared.

    It is the squared Wasserstein-2 distance of two Gaussians with these moments (Dowson & Landau 1982), which FID uses
    (Heusel et al. 2017, arXiv 1706.08500, eq. 6). It is at least 0, and 0 for equal moments. The bias falls as 1/n,
    so compare only values of equal n.

    Raises:
        ValueError: for fewer than 2 samples in either set, sets that differ in dimension, and a distance beyond the
            range of float64.
    """
    a, b = (x.fit() if isinstance(x, Moments) else x for x in (a, b))
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and of {len(b.mean)} dimensions differ; use one space")
    means = (a.mean - b.mean).square().sum()
    variance = a.variance + b.variance
    if not (means + variance).isfinite():
        raise ValueError("the distance exceeds the range of float64")
    if _are_equal(a, b) or not variance:
        return float(means)
    if b.covariance is None:  # the eigenvalues of rows and a covariance are those of a small matrix
        a, b = b, a
    scale = variance.sqrt()  # of the features, so that no product leaves the range of float64
    left = _factor(a, scale)
    norm = None if b.covariance is None else _sum_of_roots(left, b.covariance / variance)
    if norm is None:
        norm = torch.linalg.svdvals(left.T @ _factor(b, scale)).sum()
    spread = 1 - 2 * norm
    if spread < _NEAR:
        spread = _bures(left, _factor(b, scale))
    return float(means + spread * variance)


def few_images(num: int) -> str:
    """Return a warning about the distance of `num` images; "" if `num` is large."""
    if num >= _MANY:
        return ""
    larger = "the Fréchet distance is larger than with many"
    return f"fewer than {_MANY:,} images: {larger}; compare it only with values of the same number"


def _are_equal(a: Gaussian, b: Gaussian) -> bool:
    pairs = ((a.mean, b.mean), (a.covariance, b.covariance), (a.rows, b.rows))
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def _factor(gaussian: Gaussian, scale: Tensor) -> Tensor:
    """Return F, d r, with F F^T = covariance / scale^2 and r its numerical rank or more."""
    if gaussian.rows is not None:
        return gaussian.rows.T / scale
    assert gaussian.covariance is not None
    covariance = gaussian.covariance / scale / scale
    least = len(covariance) * _EPS
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed and bool(factor.diagonal().square().min() > least * covariance.diagonal().max()):
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    # Rounding turns an eigenvalue of zero into about eps * d times the largest, of either sign. Its square root, 1e-7,
    # would count in full in directions in which only the other set varies.
    is_large = values > values[-1] * least
    factor = vectors[:, is_large] * values[is_large].sqrt()
    return factor


def _sum_of_roots(a: Tensor, covariance: Tensor) -> Tensor | None:
    """Return tr (A B)^(1/2) for A = a a^T and B = `covariance`; None if rounding would cost too many digits.

    For B = b b^T it is the nuclear norm of a^T b. The singular values of that are the roots of the eigenvalues of
    a^T B a, which take half the time. But the root of an eigenvalue near zero loses half its digits.
    """
    if not a.shape[1]:  # all samples of the set are equal
        return a.new_zeros(())
    left = a.numpy()  # numpy takes two thirds of torch's time
    values = torch.from_numpy(numpy.linalg.eigvalsh(left.T @ covariance.numpy() @ left)).clamp(min=0)
    error = 4 * _EPS * values[-1]  # of each; a bound of the error of its root follows
    root = values.sqrt()
    bound = torch.where(values > error, error / (2 * root), error.sqrt()).sum()
    total: Tensor = root.sum()
    return total if bound < _DIGITS * total else None


def _bures(a: Tensor, b: Tensor) -> Tensor:
    """Return tr(A + B - 2 (A B)^(1/2)) for A = a a^T and B = b b^T, with a and b of shape d r.

    It is min |a - b Q|^2 over orthogonal Q (Bhatia, Jain & Lim 2019, arXiv 1712.01504). This form is a sum of squares,
    in which nothing cancels when the sets are similar.
    """
    rank = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(factor, (0, rank - factor.shape[1])) for factor in (a, b))
    left, _, right = torch.linalg.svd(b.T @ a)
    distance: Tensor = (a - b @ (left @ right)).square().sum()
    return distance
