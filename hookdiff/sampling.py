"""What is asked of the `sample` seam, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from attrs import define, field, validators
from torch import Generator, Tensor, nn

from hookdiff.randomness import derive_seed


@define(frozen=True)
class SampleRequest:
    """A wish for images `start` to `start + num` of the endless row that `(seed, stream)` stands for."""

    num: int = field(validator=validators.ge(0))  # 0 makes nothing, and asks only whether it could be done
    seed: int = 0
    start: int = 0
    stream: str = "sample"  # "evaluate" for images that are measured, so that they are not those one looks at
    weights: str | None = None  # "model", or the name of an average; None: an average if there is one

    def generators(self) -> list[Generator]:
        """One CPU generator an image: image k is the same in any grid, batch and device."""
        numbers = range(self.start, self.start + self.num)
        return [Generator().manual_seed(derive_seed(self.seed, self.stream, k)) for k in numbers]


@define(frozen=True, eq=False)
class Samples:
    """Images and the weights they came from."""

    images: Tensor  # n c h w, float32 in [-1, 1], on the model's device
    weights: str  # "model" or the name of the average that was used


class Sampler(Protocol):
    """Makes images from a trained net; `hookdiff.diffusion.Sampling` is one."""

    def sample(
        self,
        net: nn.Module,
        objective: Any,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device,
        /,
    ) -> Tensor:
        """Return one image of `shape` (c h w) per generator; `objective` is the one that `net` was trained with."""
