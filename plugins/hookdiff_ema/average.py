"""One moving average of the weights, and the averages that the keys of a config describe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import Attribute, define, field
from torch import Tensor

from hookdiff.machine import is_sharded, local_parts, norms, summed
from hookdiff_ema.profiles import Warmup, gamma_of, half_life_decay, power_decay

Length = float | list[float] | None  # length of one average, or lengths of several

_STD = 0.1  # if no length is given
_INTEGERS = {4: torch.int32, 8: torch.int64}  # type of the bits of a number, by its size in bytes


@define(eq=False)
class Average:
    """shadow <- decay * shadow + (1 - decay) * weights, in at least float32: in bf16 a decay of 0.9999 changes nothing.

    The weights must be in the order of `shadow`, which holds the average.
    """

    label: str  # "std=0.05"
    prefix: str  # of the names of the logged values
    decay: Callable[[int], float]  # at update n, counted from 0
    std: float | None = None  # of a power-function average
    shadow: dict[str, Tensor] = field(init=False)  # the average, by parameter name
    still: Tensor | float = field(default=0.0, init=False)  # number of updates since the shadow last changed
    _values: list[Tensor] = field(init=False)
    _seen: Tensor | int | None = field(default=None, init=False)  # checksum of the shadow at the last check

    def start(self, weights: Mapping[str, Tensor]) -> None:
        self.shadow = {name: value.detach().clone() for name, value in weights.items()}
        self._values = local_parts(self.shadow.values())

    def update(self, weights: list[Tensor], num_updates: int) -> None:
        """Include this rank's parts of the `weights`, after `num_updates` earlier updates."""
        torch._foreach_lerp_(self._values, weights, 1 - self.decay(num_updates))

    def on_device(self, weights: list[Tensor]) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return a tensor, to be filled with the weights' share (1 - decay), and the update as work on the device."""
        share = torch.zeros((), device=self._values[0].device)

        def update(finite: Tensor) -> None:
            moves = torch._foreach_sub(weights, self._values)
            torch._foreach_mul_(moves, share * finite)
            torch._foreach_add_(self._values, moves)

        return share, update

    def distance(self, weights: list[Tensor]) -> Tensor:
        """Return |weights - shadow| / |weights|, L2 over all parameters: scalar, on the device.

        `weights` are this rank's parts. At 0 the average equals the weights; near 1 it no longer follows them.
        """
        whole = list(self.shadow.values())
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in whole), torch.float32)
        apart = norms(whole, dtype, torch._foreach_sub(weights, self._values))
        distance: Tensor = torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(norms(whole, dtype, weights))
        return distance

    def count_still(self, updates: int) -> Tensor:
        """Return the number of updates since the shadow last changed; `updates` were made since the last call."""
        now = torch.stack([_bits(value).sum() for value in self._values]).sum()
        if any(map(is_sharded, self.shadow.values())):
            now = summed(now)
        moved = torch.ones_like(now) if self._seen is None else now != self._seen
        self.still = torch.where(moved.bool(), 0.0, self.still + updates)
        self._seen = now
        return self.still

    @property
    def still_state(self) -> tuple[float, int | None]:
        """The state of `count_still`. Costs a transfer."""
        return float(self.still), None if self._seen is None else int(self._seen)

    @still_state.setter
    def still_state(self, state: tuple[float, int | None]) -> None:
        self.still, self._seen = state


def _bits(value: Tensor) -> Tensor:
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.view(_INTEGERS[real.element_size()])


@define(frozen=True)
class each:
    """A validator of a number, or of each number in a list that is not empty; None is valid, too."""

    validator: Callable[[Any, Any, Any], Any]

    def __call__(self, instance: object, attribute: Attribute[Any], value: Length) -> None:
        if value == []:
            raise ValueError(f"{attribute.name} is an empty list; give a number, or remove it")
        for number in _listed(value):
            self.validator(instance, attribute, number)


def make_averages(name: str, decay: Length, half_life: Length, std: Length, warmup: Warmup) -> list[Average]:
    """Return the average that a number gives, if any, and then the averages of the lists.

    The first average logs under `name`, each further average under `name` and its label. The `warmup` applies to a
    decay and to a half-life. Raises ValueError if two of the lengths are single numbers, or if two averages are equal.
    """
    lengths = {"decay": decay, "half_life": half_life, "std": std}
    lengths = {key: value for key, value in lengths.items() if value is not None} or {"std": _STD}
    numbers = [key for key, value in lengths.items() if not isinstance(value, (list, tuple))]
    if len(numbers) > 1:
        raise ValueError(f"{' and '.join(numbers)} both set the length of one average; set one, or lists for several")
    averages: dict[str, Average] = {}
    for key in sorted(lengths, key=lambda key: key not in numbers):
        for value in _listed(lengths[key]):
            label = f"{key}={value}".removesuffix(".0")
            if label in averages:
                raise ValueError(f"{label} is given twice; remove one")
            prefix = f"{name}/{label}" if averages else name
            averages[label] = Average(label, prefix, _decay(key, value, warmup), value if key == "std" else None)
    return list(averages.values())


def _decay(key: str, value: float, warmup: Warmup) -> Callable[[int], float]:
    if key == "std":
        gamma = gamma_of(value)
        return lambda n: power_decay(n + 1, gamma)
    decay = half_life_decay(value) if key == "half_life" else value
    return lambda n: min(decay, warmup.highest(n))


def _listed(value: Length) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
