"""The plugin `lr`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, Literal

from attrs import Attribute, define, field, fields
from attrs.validators import and_, deep_iterable, ge, gt, le, optional
from torch import Tensor
from torch.optim import Optimizer

from hookdiff import Loop, UserError, hookimpl
from hookdiff_lr.schedules import cosine, cycle_done, drops, inverse_sqrt, linear, one_minus_sqrt, steps_of

log = logging.getLogger("hookdiff")
Schedule = Literal["constant", "linear", "cosine", "cosine_restarts", "step", "inverse_sqrt", "cooldown"]

# The keys that only some schedules read.
_READS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("min_ratio", "total"),
    "cosine": ("min_ratio", "total"),
    "cosine_restarts": ("min_ratio", "period", "growth"),
    "step": ("at", "drop", "total"),
    "inverse_sqrt": ("reference",),
    "cooldown": ("min_ratio", "total", "cooldown", "fall"),
}
_NEEDS = {"cosine_restarts": "period", "step": "at", "inverse_sqrt": "reference"}
_FALLS = {"linear": linear, "sqrt": one_minus_sqrt}


def _steps_or_share(_: object, attribute: Attribute[Any], value: float) -> None:
    if value >= 1 and not float(value).is_integer():
        raise ValueError(f"{attribute.name} must be whole steps, or a share of the run below 1, got {value:g}")


@define(eq=False)
class LR:
    """Sets the learning rate of each step; the optimizer's own rate is the highest it gets.

    A pure function of the number of updates: the size of the batch, micro-batches, ranks and skipped steps do not
    bend it, and a resumed run needs no state for it. Every group of every optimizer keeps its own rate.
    """

    schedule: Schedule = "cosine"
    warmup: int = field(default=0, validator=ge(0))  # steps, in a straight line up to the whole rate
    start_factor: float = field(default=0.0, validator=[ge(0), le(1)])  # of the rate at step 0, with a warm-up
    min_ratio: float = field(default=0.0, validator=[ge(0), le(1)])  # of the rate at the end of a fall
    total: int | None = field(default=None, validator=optional(ge(1)))  # steps; the run's length unless given
    # step: where the rate drops, rising, in steps or shares of the run below 1
    at: tuple[float, ...] = field(default=(), validator=deep_iterable(and_(gt(0), _steps_or_share)))
    drop: float = field(default=0.1, validator=[gt(0), le(1)])  # step: what each drop leaves of the rate
    reference: int | None = field(default=None, validator=optional(ge(1)))  # inverse_sqrt: steps of the whole rate
    period: int | None = field(default=None, validator=optional(ge(1)))  # cosine_restarts: steps of the first cycle
    growth: float = field(default=1.0, validator=ge(1))  # cosine_restarts: a cycle's length over that of the last
    cooldown: float = field(default=0.2, validator=[gt(0), _steps_or_share])  # cooldown: a share below 1, or steps
    fall: Literal["sqrt", "linear"] = "sqrt"  # cooldown: 1 - sqrt, or a straight line
    _rates: list[list[float]] = field(init=False)  # of each group of each optimizer, as configured
    _total: int = field(init=False)
    _told: dict[str, dict[str, Any]] = field(init=False)  # the groups whose rates are logged

    def __attrs_post_init__(self) -> None:
        read = _READS[self.schedule]
        for attribute in fields(type(self)):
            name = attribute.name
            readers = [schedule for schedule, keys in _READS.items() if name in keys]
            if readers and name not in read and getattr(self, name) != attribute.default:
                raise ValueError(f"{name}: not read by the schedule {self.schedule!r}, but by {', '.join(readers)}")
        if (needed := _NEEDS.get(self.schedule)) and not getattr(self, needed):
            raise ValueError(f"{needed}: needed by the schedule {self.schedule!r}")
        for kind in ([each for each in self.at if each < 1], [each for each in self.at if each >= 1]):
            if kind != sorted(kind):
                raise ValueError(f"at: must rise, got {_listed(kind)}; in order it is {_listed(sorted(kind))}")
        if self.start_factor and not self.warmup:
            raise ValueError(f"start_factor: {self.start_factor:g} is where a warm-up starts, and warmup is 0")

    def factor(self, step: int, total: int = 0) -> float:
        """Return what the rate is multiplied by after `step` updates of `total`: in [0, 1].

        It rises from `start_factor` to 1 over the first `warmup` steps; then the schedule has its say. Past `total`
        it stays where it is, unless the schedule has no end.
        """
        if step < self.warmup:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup
        return max(0.0, min(1.0, self._after_warmup(step, total)))

    def _after_warmup(self, step: int, total: int) -> float:
        match self.schedule:
            case "constant":
                return 1.0
            case "step":
                return self.drop ** drops(step, [steps_of(each, total) for each in self.at])
            case "inverse_sqrt":
                return inverse_sqrt(step, self.reference or 1)
            case "cosine_restarts":
                share = cosine(cycle_done(step - self.warmup, self.period or 1, self.growth))
            case "cooldown":
                length = steps_of(self.cooldown, total)
                share = _FALLS[self.fall](min(1.0, max(0.0, (step - (total - length)) / length)))
            case "linear" | "cosine":
                done = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
                share = linear(done) if self.schedule == "linear" else cosine(done)
        return self.min_ratio + (1 - self.min_ratio) * share

    def length(self, steps: int | None) -> int:
        """Return where the fall ends, for a run of `steps`; 0 where it has no end, and none is needed.

        Raises UserError where one is needed, or where warm-up and schedule do not go together.
        """
        has_end = self.schedule in ("linear", "cosine", "cooldown") or any(each < 1 for each in self.at)
        total = (self.total or steps or 0) if has_end else 0
        if has_end and not total:
            raise UserError("plugins.lr: the run has no end to fall towards; set plugins.lr.total")
        if self.warmup > (first := self._first_fall(total)):
            raise UserError(
                f"plugins.lr.warmup: {self.warmup} steps, but with the schedule {self.schedule!r} the rate falls from "
                f"step {first:g} on at the latest; try --set plugins.lr.warmup={int(first // 10)}, or a longer run"
            )
        drops_at = [steps_of(each, total) for each in self.at]
        if drops_at != sorted(drops_at):
            raise UserError(f"plugins.lr.at: must rise, and in a run of {total} steps it is {_listed(drops_at)}")
        return total

    def _first_fall(self, total: int) -> float:
        """Return the step by which the warm-up has to be over."""
        match self.schedule:
            case "linear" | "cosine":
                return total - 1
            case "cooldown":
                return total - steps_of(self.cooldown, total)
            case "step":
                return min(steps_of(each, total) for each in self.at)
            case "inverse_sqrt":
                return self.reference or 1
        return math.inf

    def landmarks(self, total: int) -> Iterator[tuple[str, int]]:
        """Yield what happens on the way, and the first step that has it; of restarts the first six."""
        yield from self._changes(total)
        if self.schedule == "cosine_restarts" and self.period:
            yield from islice(self._restarts(self.period), 6)

    def _changes(self, total: int) -> Iterator[tuple[str, int]]:
        if self.warmup:
            yield "end of the warm-up", self.warmup
        if self.schedule == "cooldown":
            yield "the cooldown begins", math.ceil(total - steps_of(self.cooldown, total))
        for number, each in enumerate((steps_of(each, total) for each in self.at), 1):
            yield f"drop {number}", math.ceil(each)

    def unreached(self, steps: int, total: int) -> str | None:
        """Return what to say of that which a run of `steps` never comes to; None if there is nothing."""
        if late := [f"{what} (step {at})" for what, at in self._changes(total) if at >= steps]:
            return f"lr: the run ends at step {steps}, so these never come: {', '.join(late)}"
        return None

    def _restarts(self, period: float) -> Iterator[tuple[str, int]]:
        step = self.warmup + period
        for number in count(1):
            yield f"restart {number}", math.ceil(step)
            period *= self.growth
            step += period

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        ends = [] if loop.config.steps is None else [loop.config.steps]
        if loop.config.epochs is not None:
            ends.append(loop.config.epochs * loop.feed.num_batches)
        steps = min(ends, default=None)  # a script may say both
        self._total = self.length(steps)
        if steps and loop.is_main and (late := self.unreached(steps, self._total)):
            log.warning(late)
        self._rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in loop.optimizers]
        self._told = distinct_groups(loop.optimizers)

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        factor = self.factor(loop.progress.step, self._total)
        for optimizer, rates in zip(loop.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)  # a captured graph reads it at its address
                else:
                    group["lr"] = rate * factor

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.log.due:
            loop.log({name: group["lr"] for name, group in self._told.items()})


def _listed(at: Iterable[float]) -> str:
    return f"[{', '.join(f'{each:.10g}' for each in at)}]"


def distinct_groups(optimizers: Iterable[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the first group of each rate, by the name of that rate: "lr", then "lr/GROUP"."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        if float(group["lr"]) not in [float(other["lr"]) for other in found.values()]:
            found[f"lr/{group.get('name', index)}" if found else "lr"] = group
    return found
