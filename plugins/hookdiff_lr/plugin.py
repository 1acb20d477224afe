"""The plugin `lr`."""

from __future__ import annotations

import math
from typing import Literal

from attrs import define, field
from attrs.validators import ge, le, optional
from torch import Tensor

from hookdiff import Loop, UserError, hookimpl

Schedule = Literal["constant", "linear", "cosine"]


def lr_factor(
    step: int, total: int, schedule: Schedule, warmup: int = 0, start_factor: float = 0.0, min_ratio: float = 0.0
) -> float:
    """Return what the learning rate is multiplied by after `step` of `total` updates: in [0, 1].

    It rises from `start_factor` to 1 in a straight line over the first `warmup` steps, and then stays (constant) or
    falls to `min_ratio` at `total`, in a straight line or in half a cosine (Loshchilov & Hutter 2017, arXiv
    1608.03983, eq. 5). Past `total` it stays where it is.
    """
    if step < warmup:
        return start_factor + (1 - start_factor) * step / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_ratio + (1 - min_ratio) * fall


@define(eq=False)
class LR:
    """Sets the learning rate of each step; the optimizer's own rate is the highest it gets.

    A pure function of the number of updates: the size of the batch, micro-batches, ranks and skipped steps do not
    bend it, and a resumed run needs no state for it.
    """

    schedule: Schedule = "cosine"
    warmup: int = field(default=0, validator=ge(0))  # steps
    start_factor: float = field(default=0.0, validator=[ge(0), le(1)])  # of the rate at step 0, with a warm-up
    min_ratio: float = field(default=0.0, validator=[ge(0), le(1)])  # of the rate at the end
    total: int | None = field(default=None, validator=optional(ge(1)))  # steps; the run's length unless given
    _rates: list[list[float]] = field(init=False)  # of each group of each optimizer, as configured
    _total: int = field(init=False)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in loop.optimizers]
        total = self.total or loop.config.steps
        if total is None and loop.config.epochs is not None:
            total = loop.config.epochs * loop.feed.num_batches
        if total is None and self.schedule != "constant":
            raise UserError("plugins.lr: the run has no end to fall towards; set plugins.lr.total")
        self._total = total or 0
        if self.schedule != "constant" and self.warmup >= self._total:
            raise UserError(f"plugins.lr.warmup: {self.warmup} steps leave nothing of the {self._total} to fall in")

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        factor = lr_factor(
            loop.progress.step, self._total, self.schedule, self.warmup, self.start_factor, self.min_ratio
        )
        for optimizer, rates in zip(loop.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)  # a captured graph reads it at its address
                else:
                    group["lr"] = rate * factor

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.log.due:
            loop.log({"lr": loop.optimizers[0].param_groups[0]["lr"]})
