"""Schedules of the learning rate after its warm-up, as a share of the highest rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from attrs import Attribute, define, field
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, min_len

from hookdiff.options import Choice, about, between


class LRSchedule(Choice, ABC):
    """The learning rate after the warm-up: a pure function of the step."""

    kind = "lr_schedule"
    repeats: ClassVar[bool] = False  # whether there are endless landmarks, so that no run reaches all

    @property
    def needs_end(self) -> bool:
        """Whether the rate depends on the length of the run."""
        return False

    @abstractmethod
    def factor(self, step: int, warmup: int, total: int) -> float:
        """Return the rate after `step` updates as a share of the highest rate, in [0, 1].

        `warmup` is the number of steps of the warm-up, at most `step`. `total` is the step at which the fall ends, at
        least 1; a schedule without `needs_end` may also get 0. `step` may be larger than `total`.
        """

    def first_fall(self, total: int) -> float:
        """Return the step at which the warm-up has to end at the latest; below 0 if the fall is longer than `total`."""
        return total - 1 if self.needs_end else math.inf

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        """Yield the events of the schedule, each with its first step."""
        return iter(())


@define(frozen=True)
class ConstantLR(LRSchedule):
    """Keeps the learning rate at its highest value in all steps."""

    def factor(self, step: int, warmup: int, total: int) -> float:
        return 1.0


@define(frozen=True)
class Falling(LRSchedule):
    """A schedule that falls to a share of the highest rate."""

    min_ratio: float = field(
        default=0.0, validator=between(0, 1), kw_only=True, metadata=about("rate at the end: share of the highest rate")
    )

    @property
    def needs_end(self) -> bool:
        return True

    @abstractmethod
    def left(self, step: int, warmup: int, total: int) -> float:
        """Return the share of the fall that is left, from 1 to 0; the arguments are those of `factor`."""

    def factor(self, step: int, warmup: int, total: int) -> float:
        return self.min_ratio + (1 - self.min_ratio) * self.left(step, warmup, total)


@define(frozen=True)
class LinearLR(Falling):
    """A straight line down to the end of the run."""

    def left(self, step: int, warmup: int, total: int) -> float:
        return 1 - _done(step, warmup, total)


@define(frozen=True)
class CosineLR(Falling):
    """Half a cosine down to the end of the run (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5)."""

    def left(self, step: int, warmup: int, total: int) -> float:
        return _half_cosine(_done(step, warmup, total))


@define(frozen=True)
class CosineRestartsLR(Falling):
    """Cycles of half a cosine, without an end (Loshchilov & Hutter 2017, arXiv 1608.03983)."""

    period: int = field(validator=ge(1), metadata=about("length of the first cycle", "steps"))
    mult: float = field(default=1.0, validator=ge(1), metadata=about("factor between the lengths of successive cycles"))
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
        return _half_cosine(past / length)

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        step, length = float(warmup), float(self.period)
        for number in range(1, 7):  # the first six of infinitely many
            step += length
            length *= self.mult
            yield f"restart {number}", math.ceil(step)


def steps_or_share(_: object, attribute: Attribute[Any], value: float) -> None:
    """Check that `value` is below 1, a share of the run, or a whole number of steps."""
    if value >= 1 and not float(value).is_integer():
        raise ValueError(f"{attribute.name}: expected whole steps, or a share of the run below 1, got {value:g}")


def _rising(_: object, attribute: Attribute[Any], value: tuple[float, ...]) -> None:
    for kind in ([each for each in value if each < 1], [each for each in value if each >= 1]):
        if kind != sorted(kind):
            raise ValueError(f"{attribute.name}: expected rising numbers, {sorted(kind)}, got {kind}")


@define(frozen=True)
class StepLR(LRSchedule):
    """A drop at each milestone, and a constant rate in between."""

    milestones: tuple[float, ...] = field(
        validator=and_(deep_iterable(and_(gt(0), steps_or_share)), min_len(1), _rising),
        metadata=about("rising: the steps of the drops (`[20000, 30000]`), or their shares of the run (`[0.5, 0.75]`)"),
    )
    gamma: float = field(default=0.1, validator=[gt(0), le(1)], metadata=about("factor of the rate at each drop"))

    @property
    def needs_end(self) -> bool:
        return any(each < 1 for each in self.milestones)

    def factor(self, step: int, warmup: int, total: int) -> float:
        return self.gamma ** sum(step >= each for each in self._drops(total))

    def first_fall(self, total: int) -> float:
        return self._drops(total)[0]

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        return ((f"drop {number}", math.ceil(each)) for number, each in enumerate(self._drops(total), 1))

    def _drops(self, total: int) -> list[float]:
        return sorted(steps_of(each, total) for each in self.milestones)


@define(frozen=True)
class InverseSqrtLR(LRSchedule):
    """The highest rate at first, then a fall as sqrt(reference / step), without an end (Karras et al. 2024, eq. 67)."""

    reference: int = field(validator=ge(1), metadata=about("steps before the fall, 70000 in EDM2"))

    def factor(self, step: int, warmup: int, total: int) -> float:
        return 1 / math.sqrt(max(step / self.reference, 1))

    def first_fall(self, total: int) -> float:
        return self.reference


@define(frozen=True)
class CooldownLR(Falling):
    """The highest rate, then a fall at the end of the run (WSD; Hägele et al. 2024, arXiv 2405.18392)."""

    length: float = field(default=0.2, validator=[gt(0), steps_or_share], metadata=about("share of the run, or steps"))
    shape: Literal["sqrt", "linear"] = field(
        default="sqrt", validator=in_(("sqrt", "linear")), metadata=about('"linear", or "sqrt", fast at first')
    )

    def left(self, step: int, warmup: int, total: int) -> float:
        length = min(steps_of(self.length, total), total)
        cooled = min(1.0, max(0.0, (step - (total - length)) / length))
        return 1 - (math.sqrt(cooled) if self.shape == "sqrt" else cooled)

    def first_fall(self, total: int) -> float:
        return total - steps_of(self.length, total)

    def landmarks(self, warmup: int, total: int) -> Iterator[tuple[str, int]]:
        yield "the cooldown begins", max(0, math.ceil(self.first_fall(total)))


LRSchedule.known = {
    "constant": ConstantLR,
    "linear": LinearLR,
    "cosine": CosineLR,
    "cosine_restarts": CosineRestartsLR,
    "step": StepLR,
    "inverse_sqrt": InverseSqrtLR,
    "cooldown": CooldownLR,
}


def _done(step: int, warmup: int, total: int) -> float:
    """Return the share, in [0, 1], of the way from the end of the warm-up to `total`."""
    return min(1.0, (step - warmup) / max(1, total - warmup))


def _half_cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def steps_of(amount: float, total: int) -> float:
    """Return `amount`, which is steps or a share of the run, as steps of a run of `total` steps."""
    return amount * total if amount < 1 else amount
