"""How a network is told the time and the class: features that all of its blocks read."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TimeEmbedding(nn.Module):
    """Turns times into features, by way of `num_features` sines and cosines."""

    def __init__(self, width: int, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.linear1 = nn.Linear(num_features, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, timesteps: Tensor) -> Tensor:
        """Map n times to n width."""
        # For a model cast as a whole; under autocast the weights stay float32.
        features = sinusoids(timesteps, self.num_features).to(self.linear1.weight.dtype)
        out: Tensor = self.linear2(F.silu(self.linear1(features)))
        return out


class LabelEmbedding(nn.Embedding):
    """A row of features a class, and a last one for "no class", which is label -1."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__(num_classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        """Map n labels, each from -1 to num_classes - 1, to n width."""
        return super().forward(torch.where(labels < 0, self.num_embeddings - 1, labels))


def sinusoids(timesteps: Tensor, num_features: int) -> Tensor:
    """Embed n times as n num_features cosines, then sines, in float32 whatever the dtype or the autocast.

    Cosine i and sine i have the angular frequency 10000^(-2i / num_features), `num_features` being even
    (Vaswani et al. 2017, arXiv:1706.03762): periods from 2 pi to almost 20000 pi.
    """
    # Computed afresh: a buffer would turn bf16 with the model, and to_empty would lose it. And multiplied
    # elementwise: autocast does matrix products in half precision.
    half = num_features // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.float()[:, None] * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)
