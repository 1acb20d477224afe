"""One moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

_INTEGERS = {4: torch.int32, 8: torch.int64}  # by the size of what they show the bits of


@define(eq=False)
class Average:
    """shadow <- decay * shadow + (1 - decay) * weights, in at least float32: in bf16 with decay 0.9999 it never moves.

    The weights must be in the order of the shadow.
    """

    label: str  # "std=0.05"
    prefix: str  # of what it logs
    decay: Callable[[int], float]  # at update n, counted from 0
    std: float | None = None  # of a power-function average
    shadow: dict[str, Tensor] = field(init=False)  # by parameter name
    still: Tensor | float = field(default=0.0, init=False)  # updates for which it has not moved
    _values: list[Tensor] = field(init=False)
    _seen: Tensor | int | None = field(default=None, init=False)  # sum of all bits, at the last look

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with a copy of `weights`."""
        self.shadow = {name: value.detach().clone() for name, value in weights.items()}
        self._values = list(self.shadow.values())

    def update(self, weights: list[Tensor], num_updates: int) -> None:
        """Take in `weights`, `num_updates` updates having been made."""
        torch._foreach_lerp_(self._values, weights, 1 - self.decay(num_updates))

    def distance(self, weights: list[Tensor]) -> Tensor:
        """Return |weights - shadow| / |weights|, L2 over all parameters: scalar, on the device.

        0 for long means that the average never moved; near 1, that it has lost the weights.
        """
        apart = torch._foreach_norm(torch._foreach_sub(weights, self._values))
        distance: Tensor = _total(apart) / _total(torch._foreach_norm(weights))
        return distance

    def look(self, updates: int) -> Tensor:
        """Return for how many updates it has not moved; `updates` were made since the last look."""
        now = torch.stack([_bits(value).sum() for value in self._values]).sum()
        moved = torch.ones_like(now) if self._seen is None else now != self._seen
        self.still = torch.where(moved.bool(), 0.0, self.still + updates)
        self._seen = now
        return self.still

    @property
    def looks(self) -> list[float | int | None]:
        """What the next look goes on from. Costs a transfer."""
        return [float(self.still), None if self._seen is None else int(self._seen)]

    @looks.setter
    def looks(self, looks: list[Any]) -> None:
        self.still, self._seen = looks


def _bits(value: Tensor) -> Tensor:
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.view(_INTEGERS[real.element_size()])


def _total(norms: Sequence[Tensor]) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    return total
