"""Measures how far apart samples are, in comparison with the data."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from hookdiff.features import distances


@define(frozen=True)
class Spread:
    """Spread of samples. Both ratios are relative to the data: 1 if samples vary as the data, 0 for a single image."""

    variance_ratio: float  # of the traces of the covariances
    distance: float  # mean Euclidean distance of two samples
    distance_ratio: float


def spread(samples: Tensor, data: Tensor) -> Spread:
    """Return the spread of the features `samples` (n d) beside that of `data` (m d), with n and m at least 2."""
    distance, data_distance = mean_distance(samples), mean_distance(data)
    ratio = _variance(samples) / max(_variance(data), 1e-300)
    return Spread(ratio, distance, distance / max(data_distance, 1e-300))


def mean_distance(rows: Tensor) -> float:
    """Return the mean distance of two different rows, of all pairs of `rows` (n d)."""
    total = sum(float(part.sum()) for _, part in distances(rows, rows))
    return total / (len(rows) * (len(rows) - 1))


def _variance(rows: Tensor) -> float:
    return float(rows.double().var(dim=0).sum())
