"""The gradients of one step, read in one pass and shared by all plugins."""

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
    """The norm of each gradient, the total norm and the finite flag of the current step.

    The norms are computed once per step, when a plugin first asks for them. A plugin that multiplies all gradients by a
    factor calls `scale_`, which keeps the norms right. A plugin that changes gradients in another way calls `clear`
    afterwards.

    Only the gradients of parameters that an optimizer holds are read: `names` and `parameters`, in the model's order,
    then those of other modules. A frozen parameter has no gradient; it takes part from the step on in which it is
    thawed. `dtype` is that of the norms: float32, or float64 if a weight is float64.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        # The gradients of other parameters are never cleared: they grow from step to step, and move no weight.
        held = {p: None for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if p in held}
        own = set(named.values())
        named |= {f"(not of the model) {k}": p for k, p in enumerate(p for p in held if p not in own)}
        self.names, self.parameters = list(named), list(named.values())
        self._others = {name: p for name, p in model.named_parameters() if p not in held}
        # At least float32, where the squares of half precision do not overflow; torch refuses a dtype that narrows.
        self.dtype = functools.reduce(torch.promote_types, (p.dtype for p in self.parameters), torch.float32)
        self._norms: Tensor | None = None
        self._measured: list[Tensor] = []  # the gradients that `_norms` were computed from
        self._host_loss: float | None = None
        self._host_total: float | None = None

    def unheld(self) -> list[str]:
        """Return the parameters of the model that want a gradient and that no optimizer holds, each once."""
        found = [name for name, parameter in self._others.items() if parameter.requires_grad]
        for name in found:
            del self._others[name]
        return found

    def begin(self, loss: Tensor) -> None:
        """Begin a step with this `loss`; forget the norms of the step before."""
        self._loss, self._host_loss = loss, None
        self.clear()

    def clear(self) -> None:
        """Forget the norms, because the gradients have changed."""
        self._norms = self._host_total = None

    def named(self) -> dict[str, Tensor]:
        """Return the gradients of the parameters that have one, by parameter name."""
        return {n: p.grad for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None}

    def tensors(self) -> list[Tensor]:
        """Return the gradients in the order of `named`."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def norms(self) -> Tensor:
        """L2 norms of `tensors`, as a tensor of one dimension on the device."""
        if self._norms is None:
            # The list is kept: reading `grad` of hundreds of parameters takes as long as a small kernel.
            self._measured = self.tensors()
            self._norms = self._measure(self._measured)
        return self._norms

    def measure(self) -> Tensor:
        """Return the current norms, also between two micro-batches, without keeping them."""
        return self._measure(self.tensors())

    def _measure(self, tensors: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors, 2, self.dtype)) if tensors else torch.zeros(0, dtype=self.dtype)

    @property
    def loss(self) -> float:
        """The loss of the step, on the host; `clear` keeps it."""
        return self._look()[0] if self._host_loss is None else self._host_loss

    @property
    def total_norm(self) -> float:
        """L2 norm over all gradients, on the host."""
        return self._look()[1]

    @property
    def finite(self) -> bool:
        """Whether loss and total norm are finite."""
        return all(map(math.isfinite, self._look()))

    def _look(self) -> tuple[float, float]:
        # Loss and norm are copied together: this is the only transfer to the host in a step.
        if self._host_loss is None or self._host_total is None:
            total = torch.linalg.vector_norm(self.norms)
            self._host_loss, self._host_total = torch.stack((self._loss.to(total), total)).tolist()
        return self._host_loss, self._host_total

    def nonfinite(self) -> list[str]:
        """Return the names of the gradients that hold a NaN or an infinity.

        An infinite norm alone does not prove it: the square of a finite 1e25 overflows float32. If all gradients are
        finite, the norms are computed again in float64, so that the total is right. Costs a pass over all gradients
        and a transfer.
        """
        named = self.named()
        if not named:
            return []
        flags = torch.stack([torch.isfinite(gradient).all() for gradient in named.values()]).tolist()
        names = [name for name, finite in zip(named, flags, strict=True) if not finite]
        if not names:
            self._measured = list(named.values())
            self._norms = torch.stack([torch.linalg.vector_norm(g.cpu().double()) for g in self._measured])
            self._host_total = float(torch.linalg.vector_norm(self._norms))
        return names

    def scale_(self, factor: float) -> None:
        """Multiply all gradients by `factor` >= 0 in place; the norms follow."""
        norms, total = self.norms, self.total_norm
        if self._measured:
            torch._foreach_mul_(self._measured, factor)
        self._norms, self._host_total = norms * factor, total * factor
