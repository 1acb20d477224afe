"""The optimizer `example_optimizer`: the sign of a running mean of the gradient."""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class ExampleOptimizer(Optimizer):
    """Moves each weight by the sign of the mean of its gradients: Signum, Bernstein et al. 2018 (arXiv 1802.04434).

    Args:
        params: the weights to train, or groups of them
        lr: learning rate, by which a weight moves in each step
        momentum: share of the old mean in the new one, from 0 to below 1
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.9) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"'momentum' must be in [0, 1): {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights that have a gradient; return what `closure` does."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]  # in checkpoints
                    if not state:
                        state["mean"] = torch.zeros_like(weight)
                    state["mean"].lerp_(weight.grad, 1 - group["momentum"])
                    weight.sub_(state["mean"].sign() * group["lr"])
        return loss
