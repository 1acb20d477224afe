"""Guidance of sampling by the network's outputs with and without a label."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from attrs import Attribute, define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff.choices import Choice
from hookdiff.diffusion.process import Point
from hookdiff.options import about, between

Ask = Callable[[Tensor, Tensor | None], Tensor]  # (x_t, labels: n, int64, -1 for none) -> output of the network


class Guidance(Choice, ABC):
    """Calls the network one or more times, and returns the output that the sampler follows."""

    kind = "guidance"
    default = "cfg"

    @abstractmethod
    def output(self, ask: Ask, x: Tensor, at: Point, labels: Tensor | None) -> Tensor:
        """Return the output for `x` (n c h w) at the point `at`; `labels` are None if the network takes none."""

    def check(self, diffusion: Any) -> None:
        """Raise ValueError, naming `guidance`, if it does not fit the objective (`Diffusion`)."""


def _is_interval(guidance: object, option: Attribute[Any], interval: tuple[float, float]) -> None:
    between(0, math.inf)(guidance, option, interval)
    if interval[0] > interval[1]:
        raise ValueError(f"'interval' must be [low, high]: [{interval[0]:g}, {interval[1]:g}]")


@define(frozen=True)
class ClassifierFree(Guidance):
    """u + scale (c - u), for the outputs c with a label and u without: Ho & Salimans 2022 (arXiv 2207.12598).

    The limited interval is from Kynkäänniemi et al. 2024 (arXiv 2404.07724).
    """

    scale: float = field(default=1.0, validator=ge(0), metadata=about("strength; 1: no guidance, 0: labels ignored"))
    interval: tuple[float, float] = field(
        default=(0.0, math.inf),
        converter=tuple,
        validator=_is_interval,
        metadata=about("lowest and highest sigma / alpha at which guidance is used"),
    )

    def output(self, ask: Ask, x: Tensor, at: Point, labels: Tensor | None) -> Tensor:
        low, high = self.interval
        if labels is None or self.scale == 1 or not low <= at.ratio <= high:
            return ask(x, labels)
        both = ask(torch.cat([x, x]), torch.cat([labels, torch.full_like(labels, -1)]))
        with_label, without = both.chunk(2)
        return without + self.scale * (with_label - without)  # a scale of 0 is the unconditional output exactly

    def check(self, diffusion: Any) -> None:
        if self.scale != 1 and diffusion.conditional is not None:
            if not diffusion.conditional:
                raise ValueError("'guidance' needs a network that was trained with labels, and this one was not")
            if not diffusion.label_dropout:
                raise ValueError(
                    "'guidance' needs diffusion.label_dropout above 0: the network was never trained without a label"
                )


Guidance.known = {"cfg": ClassifierFree}
