"""Counts the modes of the data that samples cover. The modes are clusters of the data's features."""

from __future__ import annotations

import numpy
import torch
from attrs import define
from torch import Tensor

from hookdiff.authors import seeded

_FEWEST = 5  # expected samples of a mode; with fewer, chance alone may leave it empty
_SHARE = 0.25  # of the expected samples: with fewer, a mode is not covered
_STARTS = 4  # runs of k-means; the best run is used


@define(frozen=True)
class Modes:
    """How samples are spread over the modes of the data."""

    judged: int  # modes that are common enough to be judged
    covered: int  # judged modes that samples cover
    dominant: float  # share of the samples in their most frequent mode
    dominant_in_data: float  # share of the data in that mode

    @property
    def coverage(self) -> float:
        return self.covered / self.judged if self.judged else 1.0


def modes(samples: Tensor, data: Tensor, num: int, seed: int = 0) -> Modes:
    """Return how the features `samples` (n d) cover `num` modes of `data` (m d), found by k-means.

    A mode is covered if at least a quarter of the expected samples are in it. It is not judged if fewer than 5 samples
    are expected in it. There are at most n / 10 modes.
    """
    with seeded(seed, torch.device("cpu")):  # the import draws from Python's generator
        from sklearn.cluster import KMeans  # slow to import

    num = max(2, min(num, len(samples) // (2 * _FEWEST), len(data) // (2 * _FEWEST)))
    clusters = KMeans(num, n_init=_STARTS, random_state=seed).fit(data.double().numpy())
    counts = numpy.bincount(clusters.predict(samples.double().numpy()), minlength=num)
    shares = numpy.bincount(clusters.labels_, minlength=num) / len(data)
    expected = shares * len(samples)
    judged = expected >= _FEWEST
    covered = judged & (counts >= _SHARE * expected)
    most = counts.argmax()
    return Modes(int(judged.sum()), int(covered.sum()), float(counts[most] / len(samples)), float(shares[most]))
