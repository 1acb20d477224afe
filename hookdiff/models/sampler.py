"""The protocol of samplers, which make images for a Loop, and the adapter for samplers of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Generator, Tensor, nn

from hookdiff.errors import UserError
from hookdiff.models.objective import LossFunction, OfOrigin
from hookdiff.options.choices import Choice


class MakesImages(Protocol):
    """An object that a Loop takes as its sampler: it has `sample`, as `Sampler` describes it."""

    def sample(self, *arguments: Any, **named: Any) -> Tensor: ...


class Sampler(Protocol):
    """Makes images from a trained net; `hookdiff.diffusion.Sampling` is one.

    Only `sample` is required. `as_sampler` gives an object the defaults of the members that it lacks. A class that
    inherits from Sampler has all members, and `loop.sampler` is then the object itself.
    """

    weights: str | None = None  # default of requests that name no weights, as `[sampling] weights`; optional
    batch_size: int = 256  # the most images that a plugin asks for at a time; optional
    guidance: Choice | None = None  # plots of images name it if the run has another; optional

    def check_objective(self, objective: LossFunction) -> None:
        """Raise UserError if no images can be made of `objective`. Optional; default: any objective is accepted.

        Called when the Loop gets this sampler.
        """
        return

    def sample(
        self,
        net: nn.Module,
        objective: LossFunction,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device,
        /,
        *,
        labels: Tensor | None = None,
        noise: Tensor | None = None,
        images: Tensor | None = None,
        mask: Tensor | None = None,
        strength: float = 0.8,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return one image of `shape` (c h w) for each generator; `net` was trained with `objective`.

        `labels` (n, int64), `noise`, `images`, `mask`, `strength` and `conditions` (n rows each) are given only if the
        `SampleRequest` has them. `objective` is the argument of the Loop.
        """


class AnySampler(Sampler):
    """A sampler made of a user's object, with defaults for members that it lacks."""

    weights: Any = OfOrigin()
    batch_size: Any = OfOrigin()
    guidance: Any = OfOrigin()
    check_objective: Any = OfOrigin()
    sample: Any = OfOrigin()

    def __init__(self, origin: MakesImages) -> None:
        self.origin = origin


def as_sampler(origin: MakesImages, objective: LossFunction | None = None) -> Sampler:
    """Return `origin` with all members of a `Sampler`, once it has checked the `objective`, if one is given.

    Raises:
        UserError: for an object without a method `sample`, or an objective that it refuses.
    """
    if Sampler in type(origin).__mro__:
        sampler = cast(Sampler, origin)
    elif callable(getattr(origin, "sample", None)):
        sampler = AnySampler(origin)
    else:
        raise UserError(f"sampler: a {type(origin).__name__} has no method sample(net, objective, shape, ...)")
    if objective is not None:
        sampler.check_objective(objective)
    return sampler
