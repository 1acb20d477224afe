"""What a config says of how long averages remember."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Attribute
from attrs.validators import optional

from hookdiff_ema.average import Average
from hookdiff_ema.profiles import Warmup, gamma_of, half_life_decay, power_decay

Length = float | list[float] | None
Decay = Callable[[int], float]  # at update n, counted from 0

DECAY = 0.999  # where nothing else is asked for


def each(*checks: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a validator of a number, or of each in a list that has some."""

    def check(instance: object, attribute: Attribute[Any], value: Length) -> None:
        numbers = _listed(value)
        if not numbers:
            raise ValueError(f"{attribute.name} is an empty list")
        for number in numbers:
            for one in checks:
                one(instance, attribute, number)

    return optional(check)


def make_averages(name: str, decay: Length, half_life: Length, std: Length, warmup: Warmup) -> list[Average]:
    """Return the averages: first the one that a number is for, then those of the lists.

    The first logs under `name`, the others under `name` and their label. A decay, or that of a half-life, has the
    `warmup`. Raises ValueError for two numbers, and for one average twice.
    """
    said = {"decay": decay, "half_life": half_life, "std": std}
    given = {key: value for key, value in said.items() if value is not None} or {"decay": DECAY}
    numbers = [key for key, value in given.items() if not _is_several(value)]
    if len(numbers) > 1:
        raise ValueError(f"{' and '.join(numbers)} both say how long one average is; set one, or lists for several")
    ordered = sorted(given, key=lambda key: key not in numbers)
    averages: dict[str, Average] = {}
    for key in ordered:
        for value in _listed(given[key]):
            label = f"{key}={value}".removesuffix(".0")
            if label in averages:
                raise ValueError(f"{label} is there twice")
            prefix = f"{name}/{label}" if averages else name
            averages[label] = Average(label, prefix, _decay(key, value, warmup), value if key == "std" else None)
    return list(averages.values())


def _decay(key: str, value: float, warmup: Warmup) -> Decay:
    if key == "std":
        gamma = gamma_of(value)
        return lambda n: power_decay(n + 1, gamma)
    decay = half_life_decay(value) if key == "half_life" else value
    return lambda n: min(decay, warmup.highest(n))


def _is_several(value: Length) -> bool:
    return isinstance(value, (list, tuple))


def _listed(value: Length) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
