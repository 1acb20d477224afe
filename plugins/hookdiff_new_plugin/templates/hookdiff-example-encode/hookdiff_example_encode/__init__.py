"""The encoder `example_encode`: the means of small squares, as latents."""

import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from hookdiff.encoding import Encoded, PictureEncoder
from hookdiff.options import about


@define(frozen=True)
class ExampleEncode(PictureEncoder):
    """Means of squares of pixels, which are decoded by repetition."""

    side: int = field(default=2, validator=ge(1), metadata=about("side of a square", "pixels"))

    def digest(self) -> str:
        """Return what the latents depend on; `hookdiff.encoding.digest_of` hashes files of weights."""
        return f"example_encode {self.side}"

    def open(self, device: torch.device) -> Encoded:
        """Return the network; one with weights would be moved to `device` here."""
        return _Means(self.side)


class _Means:
    def __init__(self, side: int) -> None:
        self.side = side

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        return avg_pool2d(pictures, self.side), None

    def decode(self, latents: Tensor) -> Tensor:
        return interpolate(latents, scale_factor=float(self.side))
