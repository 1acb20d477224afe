"""Help texts and range checks of options."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from attrs import Attribute, define, field

from hookdiff.errors import nearest


def about(help: str, unit: str = "") -> dict[str, str]:
    """Return the metadata of an option: `field(default=1000, metadata=about("how often", "steps"))`.

    docs/reference/config.md and `hookdiff plugins NAME` print the metadata.
    """
    return {"help": help, "unit": unit} if unit else {"help": help}


SERVICES = ("file", "http", "https", "s3", "gs", "az", "hf")  # protocols that an untrusted config may use
_SERVED = re.compile(rf"({'|'.join(SERVICES)})://")


def is_served(url: str) -> bool:
    """Return whether `url` has a protocol of `SERVICES`, and no "::", with which fsspec opens another URL."""
    return "::" not in url and _SERVED.match(url) is not None


@define(frozen=True)
class Writes:
    """Marks an option that names a file or a folder to write: `dir: Annotated[str | None, Writes()] = None`.

    The config of an untrusted run may name only paths in the run directory.
    """

    when: str = ""  # the option that turns writing on, such as "download"; empty: always
    in_run_dir: bool = False  # whether a relative path starts at the run directory, not at the working directory


@define(frozen=True)
class Fixed:
    """Marks an option that cannot change when a run is resumed: `depth: Annotated[int, Fixed("the reason")] = 6`."""

    reason: str


@define(frozen=True)
class Handed:
    """Marks a table of options that are passed to a library; only a trusted config of a run may set them."""


@define(frozen=True)
class between:
    """A validator that a number, or each number of a list or a table, is between `low` and `high`; None passes."""

    low: float
    high: float
    open_ends: bool = field(default=False, kw_only=True)

    def __call__(self, instance: object, option: Attribute[Any], value: Any) -> None:
        value = tuple(value.values()) if isinstance(value, dict) else value
        numbers = () if value is None else value if isinstance(value, (tuple, list)) else (value,)
        for number in numbers:
            inside = self.low < number < self.high if self.open_ends else self.low <= number <= self.high
            if not inside:  # or NaN
                brackets = "()" if self.open_ends else "[]"
                limits = f"{brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"
                shown = f"{number:g}" if isinstance(number, float) else number  # an integer may exceed all floats
                raise ValueError(f"'{option.name}' must be in {limits}: {shown}")


IS_FINITE = between(-math.inf, math.inf, open_ends=True)  # validator


def limits_of(validator: Any) -> list[tuple[str, float]]:
    """Return the limits of an attrs validator for a number, or each number of a list, such as `(">=", 0)`."""
    if isinstance(validator, between):
        below, above = (">", "<") if validator.open_ends else (">=", "<=")
        return [(below, validator.low), (above, validator.high)]
    if hasattr(validator, "compare_op"):  # ge, gt, le, lt
        return [(validator.compare_op, validator.bound)]
    inner = list(getattr(validator, "_validators", ()))  # of and_
    inner += [getattr(validator, name, None) for name in ("validator", "member_validator")]  # optional, deep_iterable
    return [limit for part in inner if part is not None for limit in limits_of(part)]


@define(frozen=True)
class one_of:
    """A validator that a string is one of `names`."""

    names: tuple[str, ...]

    def __call__(self, instance: object, option: Attribute[Any], value: Any) -> None:
        if value not in self.names:
            close = nearest(str(value), self.names)
            raise ValueError(f"'{option.name}' must be one of {', '.join(map(repr, self.names))}: {value!r}{close}")


def is_below(instance: object, option: Attribute[Any], value: str) -> None:
    """Check that `value` is a relative path without "..", as an attrs validator."""
    path = Path(value)
    if not path.name or path.is_absolute() or path.drive or ".." in path.parts:
        raise ValueError(f"'{option.name}' must be a relative path of a folder, without ..: {value!r}")


def is_interval(instance: object, option: Attribute[Any], value: tuple[float, float]) -> None:
    """Check that `value` is [low, high] with 0 <= low <= high, as an attrs validator."""
    between(0, math.inf)(instance, option, value)
    if value[0] > value[1]:
        raise ValueError(f"'{option.name}' must be [low, high] with low <= high: [{value[0]:g}, {value[1]:g}]")
