"""The data source `example_source`: drawn discs."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff.machine import derive_seed
from hookdiff.options import about

_SIDE = 16  # pixels


@define(frozen=True)
class ExampleSource:
    """White discs on black; the number of an image gives its disc."""

    labels: ClassVar[Tensor | None] = None  # n, int64, if the images have classes
    classes: ClassVar[Sequence[str] | None] = None

    num: int = field(default=256, validator=ge(1), metadata=about("number of images"))

    def __len__(self) -> int:
        return self.num

    def load(self, index: int) -> Tensor:
        """Return the image at `index`: 1 16 16, uint8."""
        generator = torch.Generator().manual_seed(derive_seed(0, "example_source", index))
        radius, y, x = (torch.rand(3, generator=generator) * 4 + torch.tensor([2.0, 6.0, 6.0])).tolist()
        rows, columns = torch.meshgrid(torch.arange(_SIDE) - y, torch.arange(_SIDE) - x, indexing="ij")
        pixels: Tensor = (rows.square() + columns.square() < radius**2).mul(255)
        return pixels[None].to(torch.uint8)

    def describe(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"disc {index}"
