"""The plugin `lookahead`: the Lookahead optimizer (Zhang et al. 2019, arXiv 1907.08610, algorithm 1)."""

from collections.abc import Generator

import torch
from attrs import define, field
from attrs.validators import ge, gt, le
from torch import Tensor

from hookdiff import Loop, hookimpl, plugin, saved
from hookdiff.machine import local_parts
from hookdiff.options import about


@plugin(hooks_version=1)
@define(eq=False)
class Lookahead:
    """Keeps a slow copy of the weights, moves it towards the weights at intervals, and resets the weights to it."""

    every: int = field(default=5, validator=ge(1), metadata=about("interval, k in the paper", "updates"))
    alpha: float = field(
        default=0.5, validator=[gt(0), le(1)], metadata=about("share of the way to the weights that the copy moves")
    )
    slow: dict[str, Tensor] = saved()  # the slow copy, by parameter name

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self.slow = {name: p.detach().clone() for name, p in loop.model.named_parameters()}

    # A wrapper, because it changes weights too: plugins called after the update must see the final weights.
    @hookimpl(wrapper=True)
    def optimizer_step(self, loop: Loop) -> Generator[None, bool, bool]:
        changed = yield
        if changed and (loop.progress.step + 1) % self.every == 0:
            # With fsdp, these are the shards of this rank.
            fast, slow = local_parts(loop.model.parameters()), local_parts(self.slow.values())
            with torch.no_grad():
                torch._foreach_lerp_(slow, fast, self.alpha)
                torch._foreach_copy_(fast, slow)
        return changed
