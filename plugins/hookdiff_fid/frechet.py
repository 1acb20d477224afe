"""The Fréchet distance between two sets of features, exact to rounding and never imaginary."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from attrs import define
from torch import Tensor


@define(eq=False, frozen=True)
class Moments:
    """Number, mean and scatter of a set of features: all that the distance needs, and it can be merged.

    Kept as the scatter about the mean and merged as Chan, Golub & LeVeque do ("Updating formulae and a pairwise
    algorithm for computing sample variances", 1979): a running sum of products loses every digit once the mean is far
    larger than the spread.

    All in float64 on the CPU, whatever made the features: the square root of the covariance's smallest eigenvalues
    turns an error of 1e-7 into one of 3e-4, not every accelerator has float64, and decompositions of such small
    matrices are no faster there.
    """

    num: int  # samples
    mean: Tensor  # d, float64
    scatter: Tensor  # d d, float64: sum over the samples of (x - mean) (x - mean)^T

    @classmethod
    def from_features(cls, features: Tensor) -> Moments:
        """Return the moments of `features`, n d, of any float type and device, n at least 1.

        Raises ValueError for another shape, and for NaN or infinity, with the number of rows that have them.
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

        Raises ValueError for no chunks, and as `from_features` and `merge` do.
        """
        each = map(cls.from_features, chunks)
        first = next(each, None)
        if first is None:
            raise ValueError("no features: expected at least one chunk")
        return reduce(cls.merge, each, first)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together. Raises ValueError when they differ in dimension."""
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
            raise ValueError(f"a covariance takes at least 2 samples, got {self.num}")
        return self.scatter / (self.num - 1)


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), in the units of the features squared.

    The squared Wasserstein-2 distance of two Gaussians with these moments (Dowson & Landau 1982), as FID has it
    (Heusel et al. 2017, arXiv 1706.08500). It is at least 0. Its bias falls as 1/n: compare only numbers of equal n.

    Raises ValueError for fewer than 2 samples in either set, or sets that differ in dimension.
    """
    _check_dimensions(a, b)
    means = (a.mean - b.mean).square().sum()
    return float(means + _bures(_factor(a.covariance), _factor(b.covariance)))


def _check_dimensions(a: Moments, b: Moments) -> None:
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and of {len(b.mean)} dimensions cannot be compared")


def _factor(covariance: Tensor) -> Tensor:
    """Return F, d r, with F F^T = covariance, r its numerical rank."""
    values, vectors = torch.linalg.eigh(covariance)
    # What rounding leaves of a zero eigenvalue, of either sign, is about eps * d times the largest; its square root,
    # 1e-7, would count in full in directions that the other set fills.
    kept = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
    factor: Tensor = vectors[:, kept] * values[kept].sqrt()
    return factor


def _bures(a: Tensor, b: Tensor) -> Tensor:
    """Return tr(A + B - 2 (A B)^(1/2)) for A = a a^T, B = b b^T, from factors d r of any rank.

    tr (A B)^(1/2) is the nuclear norm of a^T b, so the whole is min |a - b Q|^2 over orthogonal Q (Bhatia, Jain & Lim
    2019, arXiv 1712.01504). In that form it is a sum of squares: nothing cancels when the sets are alike.
    """
    rank = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(factor, (0, rank - factor.shape[1])) for factor in (a, b))
    left, _, right = torch.linalg.svd(b.T @ a)
    distance: Tensor = (a - b @ (left @ right)).square().sum()
    return distance
