"""Copies an optimizer, so that a step can be tried on copies of the weights."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def copy_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], copied: Callable[[Tensor], Tensor]) -> Optimizer:
    """Return a copy of `optimizer` without its state, so that a step of the copy changes nothing of the run.

    groups: parameter groups of `optimizer`. copied: returns the copy of a weight, with its gradient.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    fields = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler may wrap the step
    vars(copy).update(fields | {name: OrderedDict() for name in fields if name.endswith("_hooks")})
    copy.param_groups = [
        {
            key: [copied(weight) for weight in value] if key == "params" else deepcopy(value)
            for key, value in group.items()
        }
        for group in groups
    ]
    copy.state = defaultdict(dict)
    return copy
