"""A second optimizer for copies of the weights, on which a step can be tried."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def twin(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], copied: Callable[[Tensor], Tensor]) -> Optimizer:
    """Return an optimizer like `optimizer`, without its state, so that a step of it changes nothing of the run.

    groups: parameter groups of `optimizer`. copied: returns the copy of a weight, with its gradient.
    """
    made: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler may have wrapped it
    vars(made).update(own | {name: OrderedDict() for name in own if name.endswith("_hooks")})
    made.param_groups = [
        {
            key: [copied(weight) for weight in value] if key == "params" else deepcopy(value)
            for key, value in one.items()
        }
        for one in groups
    ]
    made.state = defaultdict(dict)
    return made
