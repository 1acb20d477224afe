"""Distances between all pairs of rows, computed in parts without an n x n matrix in memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

_PAIRS = 1 << 24  # distances in memory at a time


def distances(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of k rows of `a` (n d), each with the Euclidean distances (k m) to all rows of `b` (m d).

    Distances are computed in float64 by `|x|^2 + |y|^2 - 2 x y` around the mean of `b`, so an offset costs no digits.
    """
    centre = b.double().mean(dim=0)
    right = b.double() - centre
    squares = right.square().sum(dim=1)
    size = max(1, _PAIRS // max(1, len(b)))
    for start in range(0, len(a), size):
        place = slice(start, min(len(a), start + size))
        left = a[place].double() - centre
        squared = torch.addmm(squares + left.square().sum(dim=1, keepdim=True), left, right.T, alpha=-2)
        yield place, squared.clamp_(min=0).sqrt_()


def nearest_neighbours(a: Tensor, b: Tensor, k: int = 1, *, within: bool = False) -> tuple[Tensor, Tensor]:
    """Return distances (n k, float64) and positions (n k) of the `k` rows of `b` (m d) nearest to each of `a` (n d).

    `within`: `b` begins with the rows of `a`, and no row is its own neighbour.

    Raises:
        ValueError: for fewer than `k` neighbours.
    """
    if len(b) - within < k:
        raise ValueError(f"{k} nearest neighbours need more than {len(b)} samples")
    near, numbers = [], []
    for place, part in distances(a, b):
        if within:
            part[torch.arange(len(part)), torch.arange(place.start, place.stop)] = torch.inf
        values, places = part.topk(k, dim=1, largest=False)
        near.append(values)
        numbers.append(places)
    return torch.cat(near), torch.cat(numbers)
