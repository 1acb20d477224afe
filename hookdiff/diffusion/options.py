"""Checks of the options that the diffusion classes share; they become the errors of a config."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from attrs import Attribute

from hookdiff.errors import nearest

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def one_of(names: Collection[str]) -> Validator:
    """Validate that an option is one of `names`, which are looked up late: a dict may still get more."""

    def check(instance: Any, option: Attribute[Any], value: str) -> None:
        if value not in names:
            raise ValueError(f"'{option.name}' must be one of {', '.join(names)}, not {value!r}{nearest(value, names)}")

    return check


def read_by(other: str, known: Collection[str], *values: str) -> Validator:
    """Validate that an option is left alone unless the option `other` has one of `values`: nothing else reads it.

    `known` are all values of the other one: where it has none of them, that is what is wrong.
    """

    def check(instance: Any, option: Attribute[Any], value: object) -> None:
        chosen = getattr(instance, other)
        if value != option.default and chosen not in values and chosen in known:
            read = " or ".join(map(repr, values))
            raise ValueError(f"'{option.name}' is an option of {other} {read}, not {chosen!r}")

    return check


def between(low: float, high: float, *, open_ends: bool = False) -> Validator:
    """Validate that a number, or each of a list, lies between `low` and `high`; None passes."""

    def check(instance: Any, option: Attribute[Any], value: Any) -> None:
        numbers = () if value is None else value if isinstance(value, (tuple, list)) else (value,)
        for number in numbers:
            inside = low < number < high if open_ends else low <= number <= high
            if not inside:  # a NaN is not
                brackets = "()" if open_ends else "[]"
                raise ValueError(f"'{option.name}' must be in {brackets[0]}{low:g}, {high:g}{brackets[1]}: {number:g}")

    return check
