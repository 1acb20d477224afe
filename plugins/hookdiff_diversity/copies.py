"""Finds samples that are copies of training images."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.features import nearest_neighbours

_NEIGHBOURS = 10  # neighbours after the nearest; more than the copies of an image in most data sets
_CHANCE = 0.01  # share of held-out images that may look like copies
_USUAL = 2000  # largest number of held-out images that are compared with training images
_SAME = 1e-4  # largest quotient of images that are in the data twice, whose distance is nearly 0


@define(frozen=True, eq=False)
class Copies:
    """How near samples are to training images."""

    memorised: float  # share of the samples that are copies; 0.01 for images that were never trained on
    searched: float  # share of the training images that were compared
    nearest_ratio: float  # median distance to the nearest training image, divided by that of held-out images
    closest: Tensor = field(repr=False)  # n, int64: indices of the samples, most like copies first
    distances: Tensor = field(repr=False)  # n, of each sample to its nearest training image
    numbers: Tensor = field(repr=False)  # n, the row of that image


def copies(samples: Tensor, training: Tensor, held_out: Tensor | None, num_training: int | None = None) -> Copies:
    """Return how near the features `samples` (n d) are to those of `training` (m d) images, m at least 12.

    `num_training` is the number of all training images, if `training` has only some of them.

    A copy is far nearer to one training image than to all others. Its quotient is the distance to the nearest training
    image, divided by the mean distance to the next ten. A sample is a copy if 99% of the `held_out` images (k d) have a
    larger quotient; without held-out images, the training images are compared with one another. The mean of many images
    may have a small distance, but has no small quotient (Yoon et al. 2023, "Diffusion probabilistic models generalize
    when they fail to memorize"; Carlini et al. 2023, arXiv 2301.13188, section 4.1).
    """
    distances, numbers = nearest_neighbours(samples, training, _NEIGHBOURS + 1)
    if held_out is None:
        usual, _ = nearest_neighbours(training[:_USUAL], training, _NEIGHBOURS + 1, within=True)
    else:
        usual, _ = nearest_neighbours(held_out[:_USUAL], training, _NEIGHBOURS + 1)
    quotients, others = _quotients(distances), _quotients(usual)
    # With duplicates in the data, the limit would be 0, and no sample would be a copy.
    limit = torch.quantile(others[others > _SAME], _CHANCE) if bool((others > _SAME).any()) else _SAME
    median = float(usual[:, 0].median())
    return Copies(
        memorised=float((quotients < limit).double().mean()),
        searched=len(training) / (num_training or len(training)),
        nearest_ratio=float(distances[:, 0].median()) / max(median, 1e-300),
        closest=quotients.argsort(stable=True),
        distances=distances[:, 0],
        numbers=numbers[:, 0],
    )


def _quotients(near: Tensor) -> Tensor:
    """Return the distance to the nearest image over the mean distance to the next ones; 1 where all are 0."""
    others = near[:, 1:].mean(dim=1)
    return torch.where(others > 0, near[:, 0] / others, 1.0)
