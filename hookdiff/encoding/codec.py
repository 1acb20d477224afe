"""Encodes pictures to latents, and decodes latents to pictures, for a run that trains on latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.feed import Feed
from hookdiff.encoding.encoder import Encoded, PictureEncoder
from hookdiff.machine.fitting import Fitting

_AT_ONCE = 32  # pictures


@define(eq=False, slots=False)
class PictureCodec:
    """Encodes pictures to latents and decodes latents. The network is loaded at the first use.

    `make_pictures` opens the Feed of the pictures. It may raise UserError if the data is missing.
    """

    encoder: PictureEncoder
    digest: str  # of the encoder
    shape: tuple[int, ...]  # of a picture, c h w
    make_pictures: Callable[[], Feed]
    device: torch.device = field(default=torch.device("cpu"))

    @cached_property
    def pictures(self) -> Feed:
        return self.make_pictures()

    @cached_property
    def network(self) -> Encoded:
        """The network, on the device."""
        return self.encoder.open(self.device)

    def encode(self, pictures: Tensor) -> Tensor:
        return self._mapped(lambda part: self.network.encode(part.to(self.device))[0], pictures)

    def decode(self, latents: Tensor) -> Tensor:
        return self._mapped(lambda part: self.network.decode(part.to(self.device)), latents)

    def _mapped(self, call: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """Return `call` of all parts of `values`, as many at a time as fit in memory."""
        fitting = Fitting(_AT_ONCE, self.device)
        with torch.no_grad():
            parts = [
                *fitting.parts(range(len(values)), lambda part: call(values[part.start : part.stop].float()).float())
            ]
        return torch.cat(parts).to(values.device) if parts else values.new_empty(0, *self.shape)
