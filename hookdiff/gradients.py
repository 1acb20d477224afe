"""The gradients of one step, read in one pass and shared by everyone who asks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def clear_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Set the gradients of all parameters to None, as `zero_grad` does, but without its profiler hooks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class Gradients:
    """Per-tensor norms, the total norm and the finite flag of the step under way.

    Everything is computed once a step, on the first question. Who changes gradients by a factor does it through
    `scale_`, so that the norms stay true; who changes them in another way calls `clear` afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # At least float32, where the squares of half precision do not overflow; torch refuses a dtype that narrows.
        self._dtype = functools.reduce(torch.promote_types, (p.dtype for _, p in self._parameters), torch.float32)
        self._norms: Tensor | None = None
        self._host: tuple[float, float] | None = None

    def begin(self, loss: Tensor) -> None:
        """Begin a step: `loss` is its loss, and what was read of the one before is forgotten."""
        self._loss, self._norms, self._host = loss, None, None

    def clear(self) -> None:
        """Forget the norms: the gradients are others now."""
        self._norms = self._host = None

    def named(self) -> dict[str, Tensor]:
        """Return the gradients of the parameters that have one, by parameter name."""
        return {name: p.grad for name, p in self._parameters if p.grad is not None}

    def tensors(self) -> list[Tensor]:
        """Return the gradients in the order of `named`."""
        return [p.grad for _, p in self._parameters if p.grad is not None]

    @property
    def norms(self) -> Tensor:
        """L2 norm of each of `tensors`: (tensors,), on the device; float32, or float64 where a weight is."""
        if self._norms is None:
            self._norms = torch.stack(torch._foreach_norm(self.tensors(), 2, self._dtype))
        return self._norms

    @property
    def loss(self) -> float:
        """The step's loss, on the host."""
        return self._on_host()[0]

    @property
    def total_norm(self) -> float:
        """L2 norm over all gradients, on the host."""
        return self._on_host()[1]

    @property
    def finite(self) -> bool:
        """Whether loss and total norm are finite."""
        return all(map(math.isfinite, self._on_host()))

    def _on_host(self) -> tuple[float, float]:
        # Loss and norm travel together: this is the step's one transfer.
        if self._host is None:
            total = torch.linalg.vector_norm(self.norms)
            loss, norm = torch.stack((self._loss.to(total), total)).tolist()
            self._host = loss, norm
        return self._host

    def nonfinite(self) -> list[str]:
        """Return the names of the gradients that hold a NaN or an infinity.

        An infinite norm does not prove one: a finite 1e25 overflows float32 when it is squared. When there is none
        the norms are taken again in float64, so that the total is right. Costs a pass and a transfer: a second look.
        """
        named = self.named()
        flags = torch.stack([torch.isfinite(gradient).all() for gradient in named.values()]).tolist()
        names = [name for name, finite in zip(named, flags, strict=True) if not finite]
        if not names:
            self._norms = torch.stack([torch.linalg.vector_norm(g.cpu().double()) for g in named.values()])
            self._host = self.loss, float(torch.linalg.vector_norm(self._norms))
        return names

    def scale_(self, factor: float) -> None:
        """Multiply all gradients by `factor` >= 0 in place; the norms follow."""
        norms, (loss, total) = self.norms, self._on_host()
        torch._foreach_mul_(self.tensors(), factor)
        self._norms, self._host = norms * factor, (loss, total * factor)
