"""The plugin `lookahead`: the Lookahead optimizer (Zhang et al. 2019, arXiv 1907.08610, algorithm 1)."""

from collections.abc import Generator, Mapping
from typing import Any

import torch
from attrs import define, field
from attrs.validators import ge, gt, le
from torch import Tensor

from hookdiff import Loop, hookimpl
from hookdiff.options import about
from hookdiff.shards import fill_, parts


@define(eq=False)
class Lookahead:
    """Keeps a slow copy of the weights, moves it towards the weights at intervals, and resets the weights to it."""

    hooks_version = 1  # of the hooks that it is made for; without a type, so that it is no key

    every: int = field(default=5, validator=ge(1), metadata=about("interval, k in the paper", "updates"))
    alpha: float = field(
        default=0.5, validator=[gt(0), le(1)], metadata=about("share of the way to the weights that the copy moves")
    )
    slow: dict[str, Tensor] = field(init=False)  # by parameter name

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self.slow = {name: p.detach().clone() for name, p in loop.model.named_parameters()}

    # A wrapper, because it changes weights too: plugins called after the update must see the final weights.
    @hookimpl(wrapper=True)
    def optimizer_step(self, loop: Loop) -> Generator[None, bool, bool]:
        changed = yield
        if changed and (loop.progress.step + 1) % self.every == 0:
            fast, slow = parts(loop.model.parameters()), parts(self.slow.values())  # with fsdp, of this rank
            with torch.no_grad():
                torch._foreach_lerp_(slow, fast, self.alpha)
                torch._foreach_copy_(fast, slow)
        return changed

    def state_dict(self) -> dict[str, Any]:
        return dict(self.slow)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            fill_(self.slow[name], value)
