"""The plugin `lr`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field
from attrs.validators import ge, optional
from torch import Tensor
from torch.optim import Optimizer

from hookdiff import Loop, UserError, hookimpl
from hookdiff.options import about, between, chosen
from hookdiff_lr.schedules import ConstantLR, LRSchedule, steps_of, steps_or_share

logger = logging.getLogger("hookdiff")


@define(frozen=True)
class RateCurve:
    """The learning rate of a run, as a share of the highest rate: a warm-up, and then the schedule."""

    schedule: LRSchedule
    warmup: int  # steps
    start_factor: float
    total: int  # step at which the fall ends; 0 if the schedule needs no end

    def factor(self, step: int) -> float:
        """Return the share after `step` updates, in [0, 1].

        It rises from `start_factor` to 1 over the first `warmup` steps, and then follows the schedule.
        """
        if step < self.warmup:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup
        return max(0.0, min(1.0, self.schedule.factor(step, self.warmup, self.total)))

    def landmarks(self) -> Iterator[tuple[str, int]]:
        """Yield the events of the curve, each with its first step."""
        if self.warmup:
            yield "end of the warm-up", self.warmup
        yield from self.schedule.landmarks(self.warmup, self.total)


@define(frozen=True)
class OwnRates:
    """The groups of all optimizers, each with the rate that the config gives it."""

    groups: Sequence[tuple[dict[str, Any], float]]

    @classmethod
    def of(cls, loop: Loop, adopted: Iterable[str] = ()) -> OwnRates:
        """Return the rates of the optimizers of `loop`, and of those of the plugins called `adopted`."""
        optimizers = (*loop.optimizers, *(trained.optimizer for _, _, trained in loop.adopted.named(adopted)))
        return cls([(group, float(group["lr"])) for each in optimizers for group in each.param_groups])

    def scale(self, factor: float) -> None:
        """Set each rate to `factor` times that of the config, so that the rates keep their ratios."""
        for group, rate in self.groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)  # a captured CUDA graph reads the rate at this address
            else:
                group["lr"] = rate * factor


@define(eq=False)
class LR:
    """Sets the learning rate of each step; the optimizer's rate in the config is the highest rate.

    The rate is a pure function of the number of updates: batch size, micro-batches, ranks and skipped steps do not
    change it, and a resumed run needs no state for it. Every group of every optimizer keeps its own highest rate.
    """

    schedule: LRSchedule = field(
        default=ConstantLR(), converter=chosen[LRSchedule], metadata=about("schedule of the rate after the warm-up")
    )
    warmup: float = field(
        default=0.05,
        validator=[ge(0), steps_or_share],
        metadata=about("length of the linear rise to the highest rate: share of the run, or steps; 0: none"),
    )
    start_factor: float = field(
        default=0.0, validator=between(0, 1), metadata=about("rate at step 0 of a warm-up: share of the highest rate")
    )
    total: int | None = field(
        default=None, validator=optional(ge(1)), metadata=about("step at which the fall ends; default: the last step")
    )
    adopted: tuple[str, ...] = field(
        default=(), metadata=about("plugins with optimizers of their own that follow the schedule too")
    )
    _curve: RateCurve = field(init=False)
    _rates: OwnRates = field(init=False)
    _logged: dict[str, dict[str, Any]] = field(init=False)  # optimizer groups by the logged name of their rate

    def __attrs_post_init__(self) -> None:
        if self.total and not self.schedule.needs_end:
            raise ValueError(f"total: the schedule {self.schedule.use!r} has no end; leave it out")
        if self.start_factor and not self.warmup:
            raise ValueError(f"start_factor = {self.start_factor:g} needs a warm-up: set warmup, or leave it out")

    def curve(self, steps: int | None) -> RateCurve:
        """Return the curve of a run of `steps`. A warm-up ends at the latest where the schedule first falls.

        Raises:
            UserError: if the schedule needs an end, and neither `steps` nor `total` is given, or if the warm-up is a
                share of a run without end.
        """
        total = (self.total or steps or 0) if self.schedule.needs_end else 0
        if self.schedule.needs_end and not total:
            raise UserError("plugins.lr: the schedule ends with the run, but the run has no end; set plugins.lr.total")
        first, warmup = self.schedule.first_fall(total), self._warmup(steps)
        warmup = warmup if warmup <= first else max(0, int(first))
        return RateCurve(self.schedule, warmup, self.start_factor, total)

    def _warmup(self, steps: int | None) -> int:
        """Return the steps of the warm-up in a run of `steps`, before they are shortened."""
        length = self.total or steps
        if 0 < self.warmup < 1 and not length:
            raise UserError(
                f"plugins.lr.warmup: {self.warmup:g} is a share of the run, but the run has no end; set a number of "
                "steps, or 0"
            )
        return int(steps_of(self.warmup, length or 0))

    def remarks(self, steps: int | None) -> Iterator[str]:
        """Yield a sentence on each option that a run of `steps` shortens or never reaches."""
        curve, use = self.curve(steps), self.schedule.use
        if self.schedule.first_fall(curve.total) < 0:
            yield f"lr: the fall of the schedule {use!r} is longer than {curve.total:,} steps, and is shortened to them"
        if curve.warmup < (wanted := self._warmup(steps)):
            yield (
                f"lr: the warm-up of {wanted:,} steps is cut to {curve.warmup:,}: the rate of the schedule {use!r} "
                f"falls from step {curve.warmup:,} on"
            )
        marks = curve.landmarks() if steps and not self.schedule.repeats else ()
        if late := [f"{event} (step {at:,})" for event, at in marks if steps and at >= steps]:
            yield f"lr: the run ends at step {steps:,}, so these events never come: {', '.join(late)}"

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        steps = loop.config.planned_steps(loop.feed)
        self._curve = self.curve(steps)
        for remark in self.remarks(steps) if loop.is_main else ():
            logger.warning(remark)
        self._rates = OwnRates.of(loop, self.adopted)
        self._logged = distinct_groups(loop.optimizers)

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        self._rates.scale(self._curve.factor(loop.progress.step))

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.log.due:
            loop.log({name: group["lr"] for name, group in self._logged.items()})


def distinct_groups(optimizers: Iterable[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the first group with each different rate, by the logged name of the rate: "lr", then "lr/GROUP"."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    distinct: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        if float(group["lr"]) not in [float(other["lr"]) for other in distinct.values()]:
            distinct[f"lr/{group.get('name', index)}" if distinct else "lr"] = group
    return distinct
