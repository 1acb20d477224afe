"""A weight divided by its largest singular value, as a parametrisation of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

SETTLING = 15  # iterations from a random start: torch takes as many


class DividedBySigma(nn.Module):
    """W / sigma(W), where the power method finds sigma = u' W v (Miyato et al. 2018, arXiv 1802.05957, algorithm 1).

    `transposed` is for a weight whose second dimension has the outputs, as that of a transposed convolution. A forward
    does not move u and v: whoever trains calls `iterate` once an update. So all micro-batches of an update, and what
    gradient checkpointing computes again, see one weight; and reading the weight costs one product.
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, transposed: bool, generator: Generator) -> None:
        super().__init__()
        self.transposed = transposed
        for name, size in zip(("u", "v"), self._matrix(weight).shape, strict=True):
            drawn = torch.randn(size, generator=generator)  # on the CPU: alike on all devices
            self.register_buffer(name, F.normalize(drawn, dim=0).to(weight))
        self.iterate(weight, SETTLING)

    def _matrix(self, weight: Tensor) -> Tensor:
        return (weight.transpose(0, 1) if self.transposed else weight).flatten(1)

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` with a largest singular value of 1."""
        with _without_autocast(weight.device):  # bf16 would leave sigma three digits
            return weight / torch.dot(self.u, self._matrix(weight) @ self.v)

    @torch.no_grad()
    def iterate(self, weight: Tensor, times: int = 1) -> None:
        """Bring u and v nearer to the first singular vectors of `weight`."""
        matrix = self._matrix(weight.detach())
        for _ in range(times):
            self.u.copy_(F.normalize(matrix @ self.v, dim=0))
            self.v.copy_(F.normalize(self.u @ matrix, dim=0))


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def normalised(model: nn.Module) -> list[tuple[DividedBySigma, Tensor]]:
    """Return the parametrisation of each normalised weight of `model`, and that weight before the division."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    return [(each[0], each.original) for each in lists if isinstance(each[0], DividedBySigma)]
