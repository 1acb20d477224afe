"""The Inception Score, from the class probabilities that a network gives to images."""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

_PARTS = 10


def inception_score(logits: Tensor) -> tuple[float, float]:
    """Return exp(E KL(p(y|x) || p(y))) of `logits` (n k): the mean over ten random parts, and the parts' deviation.

    It lies between 1 and k (Salimans et al. 2016, arXiv 1606.03498, section 4), and grows with the number of images.

    Raises:
        ValueError: for fewer than 10 images.
    """
    if len(logits) < _PARTS:
        raise ValueError(f"the Inception Score needs at least {_PARTS} images, got {len(logits)}")
    scores = []
    ends = [len(logits) * part // _PARTS for part in range(1, _PARTS)]
    # Images may be sorted by class, so shuffle them; in the order of torch-fidelity, to get the same parts.
    order = numpy.random.RandomState(2020).permutation(len(logits))
    for part in torch.tensor_split(logits[order].double(), ends):
        log_p = part.log_softmax(dim=1)
        log_mean = log_p.logsumexp(dim=0) - math.log(len(part))
        scores.append((log_p.exp() * (log_p - log_mean)).sum(dim=1).mean().exp())
    part_scores = torch.stack(scores)
    return float(part_scores.mean()), float(part_scores.std(correction=0))
