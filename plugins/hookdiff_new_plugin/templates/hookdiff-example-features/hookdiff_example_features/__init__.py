"""The features `example_features`: the means of the squares of an image."""

import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hookdiff.data import to_unit_range
from hookdiff.features import Embedding, Features, Space
from hookdiff.options import about


@define(frozen=True)
class ExampleFeatures(Features):
    """The means of the squares of an image, in rows and columns."""

    side: int = field(default=4, validator=ge(1), metadata=about("number of rows, and of columns"))

    def open(self, device: torch.device) -> Space:
        """Return the space; a network would be moved to `device` here."""

        def embed(images: Tensor) -> Embedding:  # n c h w, uint8
            return adaptive_avg_pool2d(to_unit_range(images), self.side).flatten(1), None

        name = f"example_features/{self.side}"
        return Space(name, key=name, embed=embed, device=device)
