"""Clipping of predicted images to [-1, 1] in each step of sampling."""

from abc import ABC, abstractmethod
from typing import ClassVar

from attrs import define, field
from torch import Tensor

from hookdiff.options.choices import Choice
from hookdiff.options.fields import about, between


class Clipping(Choice, ABC):
    """Keeps predicted images in [-1, 1]."""

    kind = "clipping"
    clips: ClassVar[bool] = True  # whether `clip` changes anything

    @abstractmethod
    def clip(self, images: Tensor) -> Tensor:
        """Return `images` (n c h w) in [-1, 1]."""


@define(frozen=True)
class NoClipping(Clipping):
    """Leave predicted images unchanged; a step is then an affine map of x_t and the output."""

    clips = False

    def clip(self, images: Tensor) -> Tensor:
        return images


@define(frozen=True)
class Clamp(Clipping):
    """Clamp every pixel of a predicted image to [-1, 1]."""

    def clip(self, images: Tensor) -> Tensor:
        return images.clamp(-1, 1)


@define(frozen=True)
class DynamicThreshold(Clipping):
    """Scale images of a wider range down to [-1, 1]: Saharia et al. 2022 (arXiv 2205.11487), section 2.3."""

    ratio: float = field(
        default=0.995, validator=between(0, 1), metadata=about("quantile of absolute values that becomes 1")
    )

    def clip(self, images: Tensor) -> Tensor:
        bound = images.abs().flatten(1).quantile(self.ratio, dim=1).clamp(min=1).view(-1, 1, 1, 1)
        return (images / bound).clamp(-1, 1)


Clipping.known = {"none": NoClipping, "clamp": Clamp, "dynamic": DynamicThreshold}
