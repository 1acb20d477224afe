"""Schedules: how a learning rate goes on after its warm-up, as a share of the highest rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from attrs import Attribute, define, field
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, min_len

from hookdiff.choices import Choice
from hookdiff.options import about, between


class Schedule(Choice, ABC):
    """The learning rate after the warm-up: a pure function of the step."""

    kind = "lr_schedule"
    default = "cosine"
    repeats: ClassVar[bool] = False  # whether the landmarks come again and again, so that no run has them all

    @property
    def needs_end(self) -> bool:
        """Whether the rate depends on the length of the run."""
        return False

    @abstractmethod
    def factor(self, step: int, warmup: int, total: int) -> float:
        """Return the share of the highest rate after `step` updates, at least `warmup`, in [0, 1].

        `warmup` is the number of steps that the warm-up took. `total` is the step at which the fall ends, at least 1,
        and 0 unless `needs_end`; `step` may lie beyond.
        """

    def first_fall(self, total: int) -> float:
        """Return the step by which a warm-up has to be over; below 0 if the fall is longer than `total`."""
        return total - 1 if self.needs_end else math.inf

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        """Yield what happens on the way, and the first step that has it."""
        return iter(())


@define(frozen=True)
class Constant(Schedule):
    """The whole rate."""

    def factor(self, step: int, warmup: int, total: int) -> float:
        return 1.0


@define(frozen=True)
class Falling(Schedule):
    """A schedule that falls to a share of the rate."""

    min_ratio: float = field(
        default=0.0, validator=between(0, 1), kw_only=True, metadata=about("share left at the end")
    )

    @property
    def needs_end(self) -> bool:
        return True

    @abstractmethod
    def left(self, step: int, warmup: int, total: int) -> float:
        """Return how much of the fall is still ahead, from 1 to 0; the arguments are those of `factor`."""

    def factor(self, step: int, warmup: int, total: int) -> float:
        return self.min_ratio + (1 - self.min_ratio) * self.left(step, warmup, total)


@define(frozen=True)
class Linear(Falling):
    """A straight line down, over the rest of the run."""

    def left(self, step: int, warmup: int, total: int) -> float:
        return 1 - done(step, warmup, total)


@define(frozen=True)
class Cosine(Falling):
    """Half a cosine down, over the rest of the run (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5)."""

    def left(self, step: int, warmup: int, total: int) -> float:
        return half_cosine(done(step, warmup, total))


@define(frozen=True)
class CosineRestarts(Falling):
    """Half cosines, one after the other, without an end (Loshchilov & Hutter 2017, arXiv 1608.03983)."""

    period: int = field(validator=ge(1), metadata=about("length of the first cycle", "steps"))
    mult: float = field(default=1.0, validator=ge(1), metadata=about("length of a cycle over that of the one before"))
    repeats: ClassVar[bool] = True

    @property
    def needs_end(self) -> bool:
        return False

    def left(self, step: int, warmup: int, total: int) -> float:
        past, length = float(step - warmup), float(self.period)
        if self.mult == 1:
            past %= length
        while past >= length:
            past -= length
            length *= self.mult
        return half_cosine(past / length)

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        """Yield the first six restarts."""
        step, length = float(warmup), float(self.period)
        for number in range(1, 7):
            step += length
            length *= self.mult
            yield f"restart {number}", math.ceil(step)


def _steps_or_share(_: object, attribute: Attribute[Any], value: float) -> None:
    if value >= 1 and not float(value).is_integer():
        raise ValueError(f"{attribute.name} must be whole steps, or a share of the run below 1, got {value:g}")


def _rising(_: object, attribute: Attribute[Any], value: tuple[float, ...]) -> None:
    for kind in ([each for each in value if each < 1], [each for each in value if each >= 1]):
        if kind != sorted(kind):
            raise ValueError(f"{attribute.name} must rise, got {kind}; in order it is {sorted(kind)}")


@define(frozen=True)
class Step(Schedule):
    """Drops at the milestones, and is constant in between."""

    milestones: tuple[float, ...] = field(
        validator=and_(deep_iterable(and_(gt(0), _steps_or_share)), min_len(1), _rising),
        metadata=about("where the rate drops, rising: steps (`[20000, 30000]`), or shares of the run (`[0.5, 0.75]`)"),
    )
    gamma: float = field(default=0.1, validator=[gt(0), le(1)], metadata=about("what each drop leaves of the rate"))

    @property
    def needs_end(self) -> bool:
        return any(each < 1 for each in self.milestones)

    def factor(self, step: int, warmup: int, total: int) -> float:
        return self.gamma ** sum(step >= each for each in self.drops(total))

    def first_fall(self, total: int) -> float:
        return self.drops(total)[0]

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        return ((f"drop {number}", math.ceil(each)) for number, each in enumerate(self.drops(total), 1))

    def drops(self, total: int) -> list[float]:
        """Return the milestones in steps, in order."""
        return sorted(steps_of(each, total) for each in self.milestones)


@define(frozen=True)
class InverseSqrt(Schedule):
    """The whole rate at first, then sqrt(reference / step), without an end (Karras et al. 2024, EDM2, eq. 67)."""

    reference: int = field(validator=ge(1), metadata=about("the rate falls beyond; 70000 in EDM2", "steps"))

    def factor(self, step: int, warmup: int, total: int) -> float:
        return 1 / math.sqrt(max(step / self.reference, 1))

    def first_fall(self, total: int) -> float:
        return self.reference


@define(frozen=True)
class Cooldown(Falling):
    """The whole rate, then a fall at the end: WSD, warm-up, stable, decay (Hägele et al. 2024, arXiv 2405.18392)."""

    length: float = field(default=0.2, validator=[gt(0), _steps_or_share], metadata=about("share of the run, or steps"))
    shape: Literal["sqrt", "linear"] = field(
        default="sqrt", validator=in_(("sqrt", "linear")), metadata=about('"sqrt" is 1 - sqrt, fast first; or "linear"')
    )

    def left(self, step: int, warmup: int, total: int) -> float:
        length = min(steps_of(self.length, total), total)
        cooled = min(1.0, max(0.0, (step - (total - length)) / length))
        return 1 - (math.sqrt(cooled) if self.shape == "sqrt" else cooled)

    def first_fall(self, total: int) -> float:
        return total - steps_of(self.length, total)

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        yield "the cooldown begins", max(0, math.ceil(self.first_fall(total)))


Schedule.known = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "step": Step,
    "inverse_sqrt": InverseSqrt,
    "cooldown": Cooldown,
}


def to_schedule(value: Schedule | str) -> Schedule:
    """Return the schedule that `value` is, or names."""
    return Schedule.of(value)


def done(step: int, warmup: int, total: int) -> float:
    """Return how much of the way from the end of the warm-up to `total` is done, in [0, 1]."""
    return min(1.0, (step - warmup) / max(1, total - warmup))


def half_cosine(done: float) -> float:
    """Return 1 at 0 and 0 at 1."""
    return (1 + math.cos(math.pi * done)) / 2


def steps_of(amount: float, total: int) -> float:
    """Return `amount` in steps: a share of `total` below 1, or steps."""
    return amount * total if amount < 1 else amount
