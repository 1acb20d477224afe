"""Guidance of sampling by the network's outputs with and without label and conditions."""

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff.diffusion.diffusion import Diffusion, Given, Net
from hookdiff.diffusion.process import Point
from hookdiff.options.choices import Choice
from hookdiff.options.fields import about, is_interval


class Ask(Protocol):
    """Calls the network of a chain, or another network that was trained with the same objective."""

    def __call__(self, x: Tensor, given: Given, /, net: Net | None = None) -> Tensor:
        """Return the output of `net` (default: the chain's network) for x_t and the labels and conditions `given`."""

    def without(self, given: Given) -> dict[str, Tensor]:
        """Return the labels and conditions of unconditional samples, of the same shapes as `given`."""


class Guidance(Choice, ABC):
    """Calls the network one or more times, and returns the output that the sampler follows."""

    kind = "guidance"
    default = "cfg"

    @abstractmethod
    def output(self, ask: Ask, x: Tensor, at: Point, given: Given) -> Tensor:
        """Return the output for `x` (n c h w) at the point `at`.

        `given` holds the labels and conditions of `x`, and is empty if the network takes none; `ask.without(given)`
        are the labels and conditions of unconditional samples.
        """

    def check(self, diffusion: Diffusion) -> None:
        """Raise ValueError, naming `guidance`, if the guidance does not fit the objective (`Diffusion`)."""


@define(frozen=True)
class ClassifierFree(Guidance):
    """u + scale (c - u), for the outputs c with all conditions and u with none: Ho & Salimans 2022 (arXiv 2207.12598).

    The limited interval is from Kynkäänniemi et al. 2024 (arXiv 2404.07724).
    """

    scale: float = field(
        default=1.0, validator=ge(0), metadata=about("strength; 1: no guidance, 0: labels and conditions ignored")
    )
    interval: tuple[float, float] = field(
        default=(0.0, math.inf),
        converter=tuple,
        validator=is_interval,
        metadata=about("lowest and highest sigma / alpha at which guidance is used"),
    )

    def output(self, ask: Ask, x: Tensor, at: Point, given: Given) -> Tensor:
        low, high = self.interval
        if not given or self.scale == 1 or not low <= at.ratio <= high:
            return ask(x, given)
        both = {name: torch.cat([given[name], nothing]) for name, nothing in ask.without(given).items()}
        conditional, unconditional = ask(torch.cat([x, x]), both).chunk(2)
        return unconditional + self.scale * (conditional - unconditional)  # at a scale of 0 exactly the unconditional

    def check(self, diffusion: Diffusion) -> None:
        if self.scale != 1 and diffusion.conditional is not None:
            if not diffusion.conditional and not diffusion.condition_names:
                raise ValueError(
                    "'guidance' with a scale other than 1 needs a network trained with labels or conditions: set "
                    "diffusion.conditional = true or diffusion.conditions"
                )
            if not diffusion.drops:
                raise ValueError(
                    "'guidance' needs diffusion.label_dropout above 0, for the label and each condition or for `all`: "
                    "the network was never trained without them"
                )


Guidance.known = {"cfg": ClassifierFree}
