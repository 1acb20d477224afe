"""Precision, recall, density and coverage: whether samples lie among the data, and the data among samples."""

from __future__ import annotations

import torch
from torch import Tensor

from hookdiff.features import distances, nearest_neighbours

_PRECISION_K = 3  # Kynkäänniemi et al. 2019
_DENSITY_K = 5  # Naeem et al. 2020


def neighbourhoods(samples: Tensor, data: Tensor) -> dict[str, float]:
    """Return precision, recall, density and coverage of the features of `samples` (n d) and `data` (m d).

    * precision, recall: the share of samples in the neighbourhood of a data point, and of data points in the
      neighbourhood of a sample. A neighbourhood reaches to the 3rd nearest point of the same set (Kynkäänniemi et al.
      2019, arXiv 1904.06991).
    * density: for a sample, the mean number of data points with the sample in their neighbourhood, divided by 5, which
      may exceed 1. coverage: the share of data points with any sample in their neighbourhood. Here a neighbourhood
      reaches to the 5th nearest point (Naeem et al. 2020, arXiv 2002.09797, eq. 3 and 4).

    The sets are compared at equal size: only the first rows of the larger set are used.

    Raises:
        ValueError: for fewer than 6 samples or data points.
    """
    num = min(len(samples), len(data))
    samples, data = samples[:num], data[:num]
    reach_data = nearest_neighbours(data, data, _DENSITY_K, within=True)[0]
    reach_samples = nearest_neighbours(samples, samples, _PRECISION_K, within=True)[0][:, -1]
    near_data, wide_data = reach_data[:, _PRECISION_K - 1], reach_data[:, -1]
    precise = recalled = dense = 0.0
    closest = torch.full((num,), torch.inf, dtype=torch.float64)  # distance of the closest sample to each data point
    for _, part in distances(samples, data):
        precise += float((part <= near_data).any(dim=1).sum())
        dense += float((part <= wide_data).sum())
        closest = torch.minimum(closest, part.min(dim=0).values)
    for _, part in distances(data, samples):
        recalled += float((part <= reach_samples).any(dim=1).sum())
    return {
        "precision": precise / num,
        "recall": recalled / num,
        "density": dense / num / _DENSITY_K,
        "coverage": float((closest <= wide_data).double().mean()),
    }
