"""The Fréchet distance between two sets of features, exact up to rounding and never imaginary."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from attrs import define
from torch import Tensor


@define(eq=False, frozen=True)
class Moments:
    """The number, mean and scatter of a set of features, from which the distance is computed.

    Two sets are merged by the formula of Chan, Golub & LeVeque ("Updating formulae and a pairwise algorithm for
    computing sample variances", 1979). A running sum of products would lose every digit when the mean is far larger
    than the spread.

    All tensors are float64 on the CPU: the square root of small eigenvalues turns an error of 1e-7 into one of 3e-4,
    some accelerators have no float64, and decompositions of such small matrices are no faster there.
    """

    num: int  # samples
    mean: Tensor  # d, float64
    scatter: Tensor  # d d, float64: sum over the samples of (x - mean) (x - mean)^T

    @classmethod
    def from_features(cls, features: Tensor) -> Moments:
        """Return the moments of `features`, n d, of any float type and device, n at least 1.

        Raises ValueError for another shape, and for rows that are not finite, with their number.
        """
        if features.dim() != 2 or 0 in features.shape:
            raise ValueError(f"expected features n d with at least one of each, got {tuple(features.shape)}")
        rows = features.detach().cpu().double()
        if bad := int((~rows.isfinite().all(dim=1)).sum()):
            raise ValueError(f"{bad} of {len(rows)} rows of features are not finite")
        mean = rows.mean(dim=0)
        centred = rows - mean
        return cls(len(rows), mean, centred.T @ centred)

    @classmethod
    def from_chunks(cls, chunks: Iterable[Tensor]) -> Moments:
        """Return the moments of all `chunks`, each n d, together; one chunk at a time is in memory.

        Raises ValueError for no chunks, and the errors of `from_features` and `merge`.
        """
        each = map(cls.from_features, chunks)
        first = next(each, None)
        if first is None:
            raise ValueError("no features: expected at least one chunk")
        return reduce(cls.merge, each, first)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together. Raises ValueError if they differ in dimension."""
        _check_dimensions(self, other)
        num = self.num + other.num
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.num / num)
        between = torch.outer(shift, shift) * (self.num * other.num / num)
        return Moments(num, mean, self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance, d d. Raises ValueError for fewer than 2 samples."""
        if self.num < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {self.num}")
        return self.scatter / (self.num - 1)


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), in the units of the features squared.

    It is the squared Wasserstein-2 distance of two Gaussians with these moments (Dowson & Landau 1982), which FID uses
    (Heusel et al. 2017, arXiv 1706.08500). It is at least 0. Its bias falls as 1/n: compare only values of equal n.

    Raises ValueError for fewer than 2 samples in either set, or sets that differ in dimension.
    """
    _check_dimensions(a, b)
    means = (a.mean - b.mean).square().sum()
    return float(means + _bures(_factor(a.covariance), _factor(b.covariance)))


def _check_dimensions(a: Moments, b: Moments) -> None:
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and of {len(b.mean)} dimensions cannot be compared")


def _factor(covariance: Tensor) -> Tensor:
    """Return F, d r, with F F^T = covariance and r its numerical rank."""
    values, vectors = torch.linalg.eigh(covariance)
    # Rounding turns an eigenvalue of zero into about eps * d times the largest, of either sign. Its square root, 1e-7,
    # would count in full in directions in which only the other set varies.
    kept = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
    factor: Tensor = vectors[:, kept] * values[kept].sqrt()
    return factor


def _bures(a: Tensor, b: Tensor) -> Tensor:
    """Return tr(A + B - 2 (A B)^(1/2)) for A = a a^T and B = b b^T, with a and b of shape d r.

    tr (A B)^(1/2) is the nuclear norm of a^T b, so the result is min |a - b Q|^2 over orthogonal Q (Bhatia, Jain & Lim
    2019, arXiv 1712.01504). This form is a sum of squares, in which nothing cancels when the sets are similar.
    """
    rank = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(factor, (0, rank - factor.shape[1])) for factor in (a, b))
    left, _, right = torch.linalg.svd(b.T @ a)
    distance: Tensor = (a - b @ (left @ right)).square().sum()
    return distance
