"""AdamW with a shorter step."""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_is_profiled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
# The step of torch calls hooks, but only once an optimizer of its class has been made.
_TORCH_STEP: Any = torch.optim.AdamW.step
_LONG_STEP: Any = _TORCH_STEP if hasattr(_TORCH_STEP, "hooked") else Optimizer.profile_hook_step(_TORCH_STEP)


class AdamW(torch.optim.AdamW):
    """AdamW with the results of torch's class (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2), bit by bit.

    With `fused=True`, a step spends less time outside of its kernel. Each step of torch's class announces itself to the
    profiler, looks for hooks, and sorts its tensors by device. This class calls the kernel at once, unless a hook or a
    profiler waits for the step, or an option needs torch's own step. Arguments, attributes and state are torch's.
    """

    def step(self, closure: Any = None) -> Any:
        """Make a step with all weights that have gradients; return the result of `closure`."""
        calls = self._calls() if closure is None and self._is_undisturbed() else None
        if calls is None:
            return _LONG_STEP(self, closure)
        with torch.no_grad():
            for tensors, options in calls:
                torch._foreach_add_(tensors[-1], 1)
                torch._fused_adamw_(*tensors, **options)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # so that torch adds nothing to it

    def _is_undisturbed(self) -> bool:
        """Return whether no hook, no profiler, and no flag or scale of an overflow has a part in the step."""
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooks = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        flags = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        return not (hooks or _is_profiled() or any(flag is not None for flag in flags))

    def _calls(self) -> list[tuple[Any, dict[str, Any]]] | None:
        """Return the arguments of the kernel for each group, or None if a group needs torch's own step."""
        calls = []
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            states: list[Any] = [self.state.get(weight) for weight in weights]
            beta1, beta2 = group["betas"]
            is_plain = (
                group["fused"]
                and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
                and all(isinstance(option, (int, float)) for option in (group["lr"], beta1, beta2))
                and all(states)  # the first step makes them
                and len({(weight.device, weight.dtype) for weight in weights}) < 2
            )
            if not is_plain:
                return None
            averages = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
            steps = [state["step"] for state in states]
            gradients = [weight.grad for weight in weights]
            if weights:
                options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
                options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False}
                calls.append(((weights, gradients, *averages, [], steps), options))
        return calls
