"""The gradients of one step, read in one pass and shared by all plugins."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.loop.adopted import Adopted
from hookdiff.machine.dtensor import local, local_parts, norms, squares
from hookdiff.machine.ranks import num_ranks, summed


class Gradients:
    """The norm of each gradient, the total norm and the finite flag of the current step.

    The norms are computed once per step, when a plugin first asks for them. A plugin that multiplies all gradients by a
    factor calls `scale_`, which keeps the norms right. A plugin that changes gradients in another way calls `clear`
    afterwards.

    Only the gradients of parameters that an optimizer holds are read: `names` and `parameters`, in the model's order,
    then those of other modules. A frozen parameter has no gradient; it takes part from the step on in which it is
    thawed. `dtype` is that of the norms: float32, or float64 if a weight is float64.

    A step may have several passes (see the hook `accumulate`). Norms and names are those of the last pass, but the step
    is finite only if all its passes are. The same holds for the gradients of the modules `adopted` from plugins, which
    are in no norm.

    With several ranks, loss and norms are those of the whole step, also if each rank holds a part of each gradient. The
    ranks exchange them once in a step, together with the numbers that `votes` returns, which are summed. All ranks must
    ask for norms at the same places.

    After the replay of a recorded step `is_applied` is true: the device has changed the gradients and updated the
    weights already. `scale_` then only keeps the norms right.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        adopted: Adopted | None = None,
        votes: Callable[[], list[float]] = list,
    ) -> None:
        self._optimizers = (*optimizers, *(adopted.optimizers if adopted else ()))
        self._adopted = adopted.named_parameters() if adopted else []
        self._brought = adopted
        self._no_loss = torch.zeros(())
        self._vote = votes
        self._num_ranks = num_ranks()
        # The gradients of other parameters are never cleared: they grow from step to step, and move no weight.
        held = {p: None for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if p in held}
        own = set(named.values())
        named |= {f"(not of the model) {k}": p for k, p in enumerate(p for p in held if p not in own)}
        self.names, self.parameters = list(named), list(named.values())
        self._others = {name: p for name, p in model.named_parameters() if p not in held}
        # At least float32, where the squares of half precision do not overflow; torch refuses a dtype that narrows.
        real = (p.dtype for p in self.parameters if not p.is_complex())  # a complex weight is frozen
        self.dtype = functools.reduce(torch.promote_types, real, torch.float32)
        self._forget()

    def unheld(self) -> list[str]:
        """Return the parameters of the model that want a gradient and that no optimizer holds, each once."""
        found = [name for name, parameter in self._others.items() if parameter.requires_grad]
        for name in found:
            del self._others[name]
        return found

    def _forget(self) -> None:
        self._earlier: list[Tensor] = []  # loss and total norm of each pass but the last
        self._pass_loss: Tensor | None = None  # of the last pass
        self._loss = self._no_loss  # of the step
        self._host_loss: float | None = None
        self._weight = 1.0  # share of this rank in the step
        self.is_applied = False
        self._votes: list[float] = []  # sums over the ranks
        self._norms: Tensor | None = None
        self._measured: list[Tensor] = []  # the gradients that `_norms` were computed from
        self.clear()

    def reset(self, weight: float = 1.0) -> None:
        """Begin a step without gradients; forget the passes of the step before.

        `weight` is the share of this rank in the samples of the step.
        """
        self._drop()
        self._forget()
        self._weight = weight

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forget all that is known of the step during the `with`; then know it again. The gradients stay."""
        kept = dict(vars(self))
        self._forget()
        try:
            yield
        finally:
            vars(self).update(kept)

    def _drop(self) -> None:
        # As `zero_grad` does, but without its profiler hooks.
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def begin(self, loss: Tensor) -> None:
        """Begin a pass with this `loss`; its gradients are there already."""
        if self._pass_loss is not None:  # its gradients were not cleared, so they are in the sum of both
            self._earlier += [self._pass_loss, torch.zeros_like(self._pass_loss)]
        self._loss = self._pass_loss = loss
        self._host_loss = None
        self.clear()

    def take(self, loss: Tensor, gradients: Sequence[Tensor | None], measured: Tensor) -> None:
        """Begin a pass of which `loss`, `gradients` of `parameters`, and their norms, `measured`, are known already."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.begin(loss)
        self._measured = [one for one in gradients if one is not None]
        self._norms = measured

    def zero(self) -> None:
        """Set all gradients to None between two passes; loss and norm of the first are kept for `finite`."""
        if self._pass_loss is not None:
            self._earlier += [self._pass_loss, torch.linalg.vector_norm(self.norms)]
            self._pass_loss = None
        self._drop()
        self.clear()

    def conclude(self, loss: Tensor) -> None:
        """Let `loss` be the loss of the step, which need not be that of the last pass."""
        if loss is not self._loss:
            self.begin(loss)

    def clear(self) -> None:
        """Forget the norms, because the gradients have changed."""
        self._norms = None
        self._measured = []
        self._host_norms: list[float] | None = None  # the total norm, and then losses and norms of all other parts
        self._exchanged: Tensor | None = None  # loss, `_host_norms` and votes, on the device

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
                self._exchange()
        assert self._norms is not None
        return self._norms

    @property
    def known_norms(self) -> Tensor | None:
        """`norms`, if they have been asked for since the gradients changed; else None."""
        return self._norms

    def measure(self) -> Tensor:
        """Return the current norms, also between two micro-batches, without keeping them.

        With several ranks they may be those of this rank's samples, until the last micro-batch.
        """
        return norms(self.tensors(), self.dtype)

    def _exchange(self) -> None:
        """Exchange norms, losses and votes with the other ranks, once adopted modules have averaged their gradients."""
        if self._brought:
            self._brought.average_gradients()
        squared = squares(self._measured, self.dtype)
        adopted = squares([p.grad for _, p in self._adopted if p.grad is not None], self.dtype).to(squared)
        losses = torch.stack([loss.to(squared) for loss in (self._loss, *self._earlier[::2])]) * self._weight
        parts = [squared, adopted, losses, torch.tensor(self._vote(), dtype=torch.float64).to(squared)]
        squared, adopted, losses, votes = torch.split(summed(torch.cat(parts)), [len(part) for part in parts])
        earlier = [norm.to(squared) for norm in self._earlier[1::2]]  # they are those of all ranks already
        values = [losses[0], squared.sum().sqrt()]
        values += [value for pair in zip(losses[1:], earlier, strict=True) for value in pair]
        values += [losses[0], adopted.sum().sqrt()] if len(adopted) else []
        self._norms, self._exchanged = squared.sqrt().to(self.dtype), torch.stack([*values, *votes])

    @property
    def loss(self) -> float:
        """The loss of the step, on the host; `clear` keeps it."""
        return self._look()[0] if self._host_loss is None else self._host_loss

    @property
    def total_norm(self) -> float:
        """L2 norm over all gradients, on the host."""
        return self._look()[1] if self._host_norms is None else self._host_norms[0]

    @property
    def votes(self) -> list[float]:
        """The sums over the ranks of what `votes` returned; empty on one rank."""
        self._look()
        return self._votes

    @property
    def finite(self) -> bool:
        """Whether all losses and total norms of the step are finite."""
        return all(map(math.isfinite, self._look()))

    @property
    def overflowed(self) -> bool:
        """Whether the first part of the step that is not finite, a pass or the adopted, has a finite loss."""
        loss, total, *others = self._look()
        parts = zip([*others[::2], loss], [*others[1::2], total], strict=True)
        return next((math.isfinite(loss) for loss, norm in parts if not math.isfinite(loss + norm)), False)

    def _look(self) -> list[float]:
        # All are copied together: this is the only transfer to the host in a step.
        if self._host_loss is None or self._host_norms is None:
            own = self.norms
            if self._exchanged is None:
                total = torch.linalg.vector_norm(own)
                values = [self._loss, total, *self._earlier]
                if self._adopted and (adopted := [p.grad for _, p in self._adopted if p.grad is not None]):
                    values += [self._loss, torch.linalg.vector_norm(norms(adopted, self.dtype))]
                self._host_loss, *self._host_norms = torch.stack([value.to(total) for value in values]).tolist()
            else:
                self._host_loss, *found = self._exchanged.tolist()
                num = len(found) - len(self._vote())
                self._host_norms, self._votes = found[:num], found[num:]
        return [self._host_loss, *self._host_norms]

    def nonfinite(self) -> list[str]:
        """Return the names of the gradients that hold a NaN or an infinity.

        An infinite norm alone does not prove it: the square of a finite 1e25 overflows float32. If all gradients are
        finite, the norms are computed again in float64, so that the total is right. Costs a pass over all gradients
        and a transfer.
        """
        earlier = self._look()[2 : 2 + len(self._earlier)]
        found = [] if all(map(math.isfinite, earlier)) else ["(of an earlier pass of the step)"]
        named = self.named()
        everything = [*named.items(), *((name, p.grad) for name, p in self._adopted if p.grad is not None)]
        if not everything:
            return found
        wrong = torch.stack([(~torch.isfinite(local(gradient))).any().float() for _, gradient in everything])
        names = [name for (name, _), flag in zip(everything, summed(wrong).tolist(), strict=True) if flag]
        if not names:
            self._measured = list(named.values())
            if self._num_ranks == 1:
                self._norms = torch.stack([torch.linalg.vector_norm(g.cpu().double()) for g in self._measured])
            else:
                self._norms = summed(squares(self._measured, torch.float64)).sqrt()
            self._host_norms = [float(torch.linalg.vector_norm(self._norms)), *earlier]
        return [*names, *found]

    def scale_(self, factor: float) -> None:
        """Multiply all gradients by `factor` >= 0 in place; the norms follow."""
        before = self.norms
        _, total, *others = self._look()
        if self._measured and not self.is_applied:
            torch._foreach_mul_(local_parts(self._measured), factor)
        self._norms = before * factor
        self._host_norms = [total * factor, *others]
