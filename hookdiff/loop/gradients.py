"""The gradients of one step, read in one pass and shared by all plugins."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.loop.adopted import Adopted
from hookdiff.machine.dtensor import local, local_parts, norms, squares
from hookdiff.machine.ranks import Exchange, num_ranks, summed

Number = TypeVar("Number", Tensor, float)  # on the device, or on the host


class Pass(NamedTuple, Generic[Number]):
    """A backward pass of a step: its loss, and the L2 norm over all its gradients."""

    loss: Number
    norm: Number


def _is_finite(numbers: Pass[float]) -> bool:
    return math.isfinite(numbers.loss) and math.isfinite(numbers.norm)


class Gradients:
    """The norm of each gradient, the total norm and the finite flag of the current step.

    The norms are computed once per step, when a plugin first asks for them. A plugin that multiplies all gradients by a
    factor calls `scale_`, which keeps the norms right. A plugin that changes gradients in another way calls `clear`
    afterwards.

    Only the gradients of parameters that an optimizer holds are read. `names` and `parameters` list these parameters:
    first those of the model, in its order. A frozen parameter has no gradient until the step in which it is thawed.
    `dtype` is the dtype of the norms: float32, or float64 if a weight is float64.

    A step may have several passes (see the hook `accumulate`). Norms and names belong to the last pass, but the step
    is finite only if all passes are. The gradients of `adopted` modules must be finite too; no norm includes them.

    With several ranks, loss and norms belong to the whole step, also of sharded gradients. The ranks sum both once in
    a step, by `exchange`. All ranks must ask for norms at the same places.

    After the replay of a recorded step `is_applied` is true: the device has changed the gradients and updated the
    weights already. `scale_` then only keeps the norms right.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        adopted: Adopted | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._optimizers = (*optimizers, *(adopted.optimizers if adopted else ()))
        self._adopted = adopted
        self._adopted_parameters = adopted.named_parameters() if adopted else []
        self._no_loss = torch.zeros(())
        self._exchange = exchange or Exchange()
        self._num_ranks = num_ranks()
        # The gradients of other parameters are never cleared: they grow from step to step, and move no weight.
        held = {p: None for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if p in held}
        of_model = set(named.values())
        named |= {f"(not of the model) {k}": p for k, p in enumerate(p for p in held if p not in of_model)}
        self.names, self.parameters = list(named), list(named.values())
        self._others = {name: p for name, p in model.named_parameters() if p not in held}
        # At least float32, where the squares of half precision do not overflow; torch refuses a dtype that narrows.
        real = (p.dtype for p in self.parameters if not p.is_complex())  # a complex weight is frozen
        self.dtype = functools.reduce(torch.promote_types, real, torch.float32)
        self._forget()

    def unheld(self) -> list[str]:
        """Return the names of trained parameters that no optimizer holds; each name is returned only once."""
        names = [name for name, parameter in self._others.items() if parameter.requires_grad]
        for name in names:
            del self._others[name]
        return names

    def _forget(self) -> None:
        self._earlier: list[Pass[Tensor]] = []  # passes before the last
        self._pass_loss: Tensor | None = None  # of the last pass
        self._loss = self._no_loss  # of the step
        self._host_loss: float | None = None
        self._weight = 1.0  # share of this rank in the step
        self.is_applied = False
        self._norms: Tensor | None = None
        self._measured: list[Tensor] = []  # the gradients that `_norms` were computed from
        self.clear()

    def reset(self, weight: float = 1.0) -> None:
        """Begin a step: drop the gradients, and forget the passes of the step before.

        `weight` is the share of this rank in the samples of the step.
        """
        self._drop()
        self._forget()
        self._weight = weight

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Forget losses and norms during the `with`, and restore them at its end. The gradients stay."""
        attributes = dict(vars(self))
        self._exchange = self._exchange.anew()
        self._forget()
        try:
            yield
        finally:
            vars(self).update(attributes)

    def _drop(self) -> None:
        # The work of `zero_grad`, without its profiler hooks.
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def begin(self, loss: Tensor) -> None:
        """Record a new pass with this `loss`, after its backward."""
        if self._pass_loss is not None:  # the gradients of that pass were not cleared: they are now sums over both
            self._earlier.append(Pass(self._pass_loss, torch.zeros_like(self._pass_loss)))
        self._loss = self._pass_loss = loss
        self._host_loss = None
        self.clear()

    def take(self, loss: Tensor, gradients: Sequence[Tensor | None], measured: Tensor) -> None:
        """Record a new pass with its `loss`, the `gradients` of `parameters`, and their norms, `measured`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.begin(loss)
        self._measured = [gradient for gradient in gradients if gradient is not None]
        self._norms = measured

    def zero(self) -> None:
        """Drop all gradients between two passes; `finite` still knows loss and norm of the first pass."""
        if self._pass_loss is not None:
            self._earlier.append(Pass(self._pass_loss, torch.linalg.vector_norm(self.norms)))
            self._pass_loss = None
        self._drop()
        self.clear()

    def conclude(self, loss: Tensor) -> None:
        """Make `loss` the loss of the step, even if it is not the loss of the last pass."""
        if loss is not self._loss:
            self.begin(loss)

    def clear(self) -> None:
        """Forget the norms, because the gradients have changed."""
        self._norms = None
        self._measured = []
        # The earlier passes, then one for the gradients of adopted modules, if there are any, then the last pass.
        self._summed: list[Pass[Tensor]] | None = None  # over the ranks, on the device
        self._passes: list[Pass[float]] | None = None  # on the host

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
            if self._num_ranks == 1:
                self._norms = norms(self._measured, self.dtype)
            else:
                self._sum_over_ranks()
        assert self._norms is not None
        return self._norms

    @property
    def known_norms(self) -> Tensor | None:
        """`norms`, if they were computed since the gradients changed; else None."""
        return self._norms

    def measure(self) -> Tensor:
        """Return the current norms, also between two micro-batches, without keeping them.

        With several ranks, until the last micro-batch, they may be those of this rank's samples only.
        """
        return norms(self.tensors(), self.dtype)

    def _sum_over_ranks(self) -> None:
        """Sum norms and losses over the ranks, once adopted modules have averaged their gradients."""
        if self._adopted:
            self._adopted.average_gradients()
        squared = squares(self._measured, self.dtype)
        adopted = squares([gradient for _, gradient in self._adopted_gradients()], self.dtype).to(squared)
        passes = [self._loss, *(earlier.loss for earlier in self._earlier)]
        losses = torch.stack([loss.to(squared) for loss in passes]) * self._weight
        squared, adopted, losses = self._exchange.summed(squared, adopted, losses)
        self._norms = squared.sqrt().to(self.dtype)
        known = [earlier.norm.to(squared) for earlier in self._earlier]  # already summed over the ranks
        self._summed = [Pass(loss, norm) for loss, norm in zip(losses[1:], known, strict=True)]
        if len(adopted):
            self._summed.append(Pass(losses[0], adopted.sum().sqrt()))
        self._summed.append(Pass(losses[0], squared.sum().sqrt()))

    def _adopted_gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in self._adopted_parameters if p.grad is not None]  # names may repeat

    @property
    def loss(self) -> float:
        """The loss of the step, on the host; `clear` keeps it."""
        return self._on_host()[-1].loss if self._host_loss is None else self._host_loss

    @property
    def total_norm(self) -> float:
        """L2 norm over all gradients, on the host."""
        return self._on_host()[-1].norm

    @property
    def finite(self) -> bool:
        """Whether all losses and total norms of the step are finite."""
        return all(map(_is_finite, self._on_host()))

    @property
    def overflowed(self) -> bool:
        """Whether the first pass that is not finite has a finite loss; adopted modules count as one pass."""
        return next((math.isfinite(each.loss) for each in self._on_host() if not _is_finite(each)), False)

    def _on_host(self) -> list[Pass[float]]:
        if self._passes is None:
            measured, passes = self.norms, self._summed
            if passes is None:
                passes = [*self._earlier]
                if adopted := [gradient for _, gradient in self._adopted_gradients()]:
                    passes.append(Pass(self._loss, torch.linalg.vector_norm(norms(adopted, self.dtype))))
                passes.append(Pass(self._loss, torch.linalg.vector_norm(measured)))
            like = passes[-1].norm
            # All are copied together: this is the only transfer to the host in a step.
            values = [value.to(like) for each in passes for value in each]
            numbers = iter(self._exchange.to_host(values))
            self._passes = [Pass(loss, next(numbers)) for loss in numbers]
            self._host_loss = self._passes[-1].loss
        return self._passes

    def nonfinite(self) -> list[str]:
        """Return the names of the gradients that hold a NaN or an infinity.

        An infinite norm alone does not prove it: the square of a finite 1e25 overflows float32. If all gradients are
        finite, the norms are computed again in float64, so that the total is right. Costs a pass over all gradients
        and a transfer.
        """
        passes, named = self._on_host(), self.named()
        earlier, last = passes[: len(self._earlier)], passes[-1]
        remarks = [] if all(map(_is_finite, earlier)) else ["(of an earlier pass of the step)"]
        everything = [*named.items(), *self._adopted_gradients()]
        if not everything:
            return remarks
        wrong = torch.stack([(~torch.isfinite(local(gradient))).any().float() for _, gradient in everything])
        names = [name for (name, _), flag in zip(everything, summed(wrong).tolist(), strict=True) if flag]
        if not names:
            self._measured = list(named.values())
            if self._num_ranks == 1:
                self._norms = torch.stack([torch.linalg.vector_norm(g.cpu().double()) for g in self._measured])
            else:
                self._norms = summed(squares(self._measured, torch.float64)).sqrt()
            self._passes = [*earlier, Pass(last.loss, float(torch.linalg.vector_norm(self._norms)))]
        return [*names, *remarks]

    def scale_(self, factor: float) -> None:
        """Multiply all gradients by `factor` >= 0 in place; the norms follow."""
        before = self.norms
        *others, last = self._on_host()
        if self._measured and not self.is_applied:
            torch._foreach_mul_(local_parts(self._measured), factor)
        self._norms = before * factor
        self._passes = [*others, Pass(last.loss, last.norm * factor)]
