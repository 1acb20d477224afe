"""A weight divided by its largest singular value, as a parametrisation of torch."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

SETTLING = 15  # iterations from a random start, as many as in torch


class DividedBySigma(nn.Module):
    """W / sigma(W), where the power method finds sigma = u' W v (Miyato et al. 2018, arXiv 1802.05957, algorithm 1).

    A forward pass does not change u and v; the training calls `iterate` once per update. So all micro-batches of an
    update use the same weight, also with gradient checkpointing, and a forward pass costs one more product.

    Args:
        weight: the weight W before the division.
        transposed: True if the second dimension of `weight` is the output dimension, as in a transposed convolution.
        generator: draws the first u and v.
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, transposed: bool, generator: Generator) -> None:
        super().__init__()
        self.transposed = transposed
        for name, size in zip(("u", "v"), self._matrix(weight).shape, strict=True):
            drawn = torch.randn(size, generator=generator)  # on the CPU: the same for all devices
            self.register_buffer(name, F.normalize(drawn, dim=0).to(weight))
        self.iterate(weight, SETTLING)

    def _matrix(self, weight: Tensor) -> Tensor:
        return (weight.transpose(0, 1) if self.transposed else weight).flatten(1)

    def forward(self, weight: Tensor) -> Tensor:
        kind = weight.device.type
        # In bf16 sigma would have only three digits.
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            return weight / torch.dot(self.u, self._matrix(weight) @ self.v)

    @torch.no_grad()
    def iterate(self, weight: Tensor, times: int = 1) -> None:
        """Bring u and v closer to the first singular vectors of `weight` by `times` iterations."""
        matrix = self._matrix(weight.detach())
        for _ in range(times):
            self.u.copy_(F.normalize(matrix @ self.v, dim=0))
            self.v.copy_(F.normalize(self.u @ matrix, dim=0))


def normalised(model: nn.Module) -> list[tuple[DividedBySigma, Tensor]]:
    """Return the parametrisation of each normalised weight of `model`, and the weight before the division."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    return [(each[0], each.original) for each in lists if isinstance(each[0], DividedBySigma)]
