"""Muon, for weights of two or more dimensions."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookdiff.machine import is_sharded, local, place, whole
from hookdiff_muon.orthogonal import batch_of, orthogonalized

Adjust = Literal["match_rms_adamw", "original", "spectral_unclamped"]
SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,  # Liu et al. 2025, eq. 4
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "spectral_unclamped": lambda rows, columns: (rows / columns) ** 0.5,
}


class Muon(Optimizer):
    """Updates along the orthogonal matrix nearest to the momentum (Jordan et al. 2024), with decoupled weight decay.

    A convolution kernel counts as a matrix with a row for each index of its first dimension, as Jordan has it. Weights
    of similar shapes are updated together. Each rank computes the whole update of a sharded weight.

    `found_inf` is a tensor on the device. If it is 1, a step changes nothing, as in fused optimizers of torch.

    The arguments are those of `muon`; `params` are weights of two or more dimensions, or groups of such weights.

    Raises:
        ValueError: a value is out of range, or a weight has fewer than two dimensions.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Adjust = "match_rms_adamw",
    ) -> None:
        for name, value, least, end in (
            ("lr", lr, 0.0, float("inf")),
            ("weight_decay", weight_decay, 0.0, float("inf")),
            ("momentum", momentum, 0.0, 1.0),
            ("ns_steps", ns_steps, 1, 100),
        ):
            if not least <= value < end:
                raise ValueError(f"{name}={value}: expected {least} to below {end}")
        if adjust_lr_fn not in SCALES:
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: expected one of {', '.join(SCALES)}")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**defaults, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn})
        shapes = [tuple(weight.shape) for group in self.param_groups for weight in group["params"] if weight.dim() < 2]
        if shapes:
            raise ValueError(f"Muon trains weights of two or more dimensions, got the shape {shapes[0]}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights that have a gradient; return the result of `closure`."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            batches = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    # A sharded weight is updated alone, since the whole weight is gathered.
                    batches[id(weight) if is_sharded(weight) else batch_of(weight)].append(weight)
            for weights in batches.values():
                self._update(weights, group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update `weights`, which have the same `batch_of` key."""
        gradients: list[Any] = [weight.grad for weight in weights]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        lr = group["lr"]
        if self.found_inf is not None:
            is_kept = self.found_inf == 0
            gradients = [torch.where(is_kept, *pair) for pair in zip(gradients, momenta, strict=True)]
            lr = lr * is_kept
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        matrices = [whole(matrix).flatten(1) for matrix in ahead]
        updates = [matrix.to(matrices[0].dtype) for matrix in orthogonalized(matrices, group["ns_steps"])]
        scale = SCALES[group["adjust_lr_fn"]]
        torch._foreach_mul_(updates, [scale(*matrix.shape) for matrix in updates])
        torch._foreach_mul_(updates, lr)
        parts = [local(weight) for weight in weights]
        torch._foreach_mul_(parts, 1 - lr * group["weight_decay"])
        shares = [update.reshape(weight.shape)[place(weight)] for update, weight in zip(updates, weights, strict=True)]
        torch._foreach_sub_(parts, shares)
