"""What is told of a tensor's values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import define
from torch import Tensor


@define(frozen=True)
class Stats:
    """The values of one tensor; `least` to `abs_max` are of the finite ones, None where there are none."""

    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    least: float | None
    most: float | None
    mean: float | None
    abs_max: float | None

    def __str__(self) -> str:
        sides = " x ".join(map(str, self.shape)) or "a number"
        bad = [f"{count} {what}" for count, what in ((self.num_nan, "NaN"), (self.num_inf, "inf")) if count]
        if self.least is None or self.most is None:
            told = " and ".join(bad) or "empty"
        else:
            told = f"{self.least:.4g} to {self.most:.4g}, mean {self.mean:.4g}, largest {self.abs_max:.4g}"
            told = f"{' and '.join(bad)}, the rest {told}" if bad else told
        return f"{self.dtype} {sides}: {told}"


def stats(values: Tensor) -> Stats:
    """Look at the values of `values`, of any dtype."""
    values = values.detach()
    dtype, shape = str(values.dtype).removeprefix("torch."), tuple(values.shape)
    real = torch.view_as_real(values) if values.is_complex() else values
    finite = real[real.isfinite()].cpu().double()
    num_nan, num_inf = int(real.isnan().sum()), int(real.isinf().sum())
    if not len(finite):
        return Stats(dtype, shape, num_nan, num_inf, None, None, None, None)
    least, most, mean = finite.min().item(), finite.max().item(), finite.mean().item()
    return Stats(dtype, shape, num_nan, num_inf, least, most, mean, max(abs(least), abs(most)))


def is_bad(value: Tensor) -> bool:
    """Whether `value` holds a NaN or an infinity."""
    return not bool(value.detach().isfinite().all())


def tensors(node: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module took or gave: nested tuples, lists and mappings."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from tensors(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from tensors(value)
