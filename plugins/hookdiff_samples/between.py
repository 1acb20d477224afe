"""Noise between two noises, for images that change from one to another."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hookdiff import SampleRequest


def noise_between(shape: Sequence[int], seed: int, rows: int, num: int) -> Tensor:
    """Return `rows` times `num` noises of `shape`: each row leads from the noise of one image to that of the next.

    It is cos(a) z0 + sin(a) z1 for angles a from 0 to pi / 2, so that the noise has the variance 1 at each of them.
    """
    ends = torch.stack([torch.randn(*shape, generator=one) for one in SampleRequest(2 * rows, seed).generators()])
    angles = torch.linspace(0, math.pi / 2, num).view(-1, *[1] * len(shape))
    return torch.cat([angles.cos() * ends[k] + angles.sin() * ends[k + 1] for k in range(0, 2 * rows, 2)])
