"""The network of an encoder of pictures, opened at the first use, and the checks of what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.picture_sizes import size_name
from hookdiff.encoding.encoded_samples import MEAN, check_finite
from hookdiff.encoding.encoder import INPUTS, STORED, Encoded, PictureEncoder
from hookdiff.encoding.encoder_output import EncoderOutput
from hookdiff.errors import UserError
from hookdiff.images.transforms import size_text
from hookdiff.machine.fitting import Fitting

AT_A_TIME = 32  # pictures that are encoded together on any number of ranks, as the rounding depends on it


@define(eq=False)
class PictureNetwork:
    """Encodes batches of pictures. All tables of the encoder `name` share it, one table for each size of pictures."""

    name: str  # of the encoder
    encoder: PictureEncoder
    device: torch.device
    describe: Callable[[int], str]  # names a sample
    network: Encoded | None = field(default=None, init=False)
    _returned: dict[tuple[int, ...], EncoderOutput] = field(factory=dict, init=False)  # by shape of the pictures
    _fitting: Fitting | None = field(default=None, init=False)
    # The first sample, which is asked for again and again, and its latents.
    _tried: tuple[Batch, dict[str, Tensor]] | None = field(default=None, init=False)

    @property
    def where(self) -> str:
        """The key of the encoder, for messages."""
        return f"data.encode.{self.name}"

    def close(self) -> None:
        """Forget the network, which frees its memory for the training."""
        self.network = None

    def open(self, shape: tuple[int, ...]) -> Encoded:
        """Load the network, and check that it takes pictures of `shape` (c h w), and returns such pictures.

        Raises:
            UserError: if the pictures do not fit the network.
        """
        if self.network is None:
            self.network, self._returned = self.encoder.open(self.device), {}
        if shape not in self._returned:
            self._check(self.network, shape)
        return self.network

    def _check(self, network: Encoded, shape: tuple[int, ...]) -> None:
        self._returned[shape] = returned = EncoderOutput(self.where, self.encoder)
        blank = torch.zeros(1, *shape, device=self.device)
        with torch.no_grad():
            try:
                latents = returned.of_pictures(network.encode(blank), 1)[MEAN]
                back = network.decode(latents).shape[1:] if self.name == INPUTS else shape
            except RuntimeError as error:  # raised by a layer
                reason = str(error).partition("\n")[0]
                raise UserError(f"{self.where}: it cannot encode pictures of {size_text(shape)}: {reason}") from None
        if tuple(back) != tuple(shape):
            factor = 2 ** round(math.log2(shape[-1] / latents.shape[-1]))
            if shape[-1] == shape[-2]:
                sides = sorted({max(1, shape[-1] // factor) * factor, -(-shape[-1] // factor) * factor})
                way_out = f"data.image_size must be a multiple of {factor}; nearest: {' or '.join(map(str, sides))}"
            else:
                near = [max(1, round(side / factor)) * factor for side in shape[-2:]]
                way_out = (
                    f"data.image_size and data.bucket_step must be multiples of {factor}, and so the sides of a list "
                    f"in data.buckets; nearest: {size_name((near[0], near[1]))}"
                )
            came = f"pictures of {size_text(shape)} come back as {size_text(back)}"
            raise UserError(f"{self.where}: {came}: {way_out}")

    def sides_of(self, batch: Batch, flips: bool) -> dict[str, Tensor]:
        """Return mean and deviation of the pictures of `batch`, and of their mirror images: n, sides, ..., float16.

        Raises:
            UserError: for a latent that is not finite.
        """
        if batch.indices is None:  # the first sample
            if self._tried is None or self._tried[0] is not batch:
                self._tried = batch, self._sides(batch, flips)
            return dict(self._tried[1])
        return self._sides(batch, flips)

    def _sides(self, batch: Batch, flips: bool) -> dict[str, Tensor]:
        columns = self.columns(batch, STORED, flips)
        check_finite(self.where, columns, batch, self.describe)
        return columns

    def columns(self, batch: Batch, dtype: torch.dtype, flips: bool) -> dict[str, Tensor]:
        """Return mean and deviation of the pictures of `batch`, and if it `flips`, of their mirror images, on the CPU.

        Both are n, sides, and the shape of a latent.
        """
        shape = tuple(batch.inputs.shape[1:])
        network = self.open(shape)
        returned = self._returned[shape]

        def encoded(part: range) -> dict[str, Tensor]:
            pictures = batch.inputs[part.start : part.stop]
            sides = [pictures, pictures.flip(-1)] if flips else [pictures]
            with torch.no_grad():
                latents = [returned.of_pictures(network.encode(side.to(self.device)), len(part)) for side in sides]
                return {name: torch.stack([side[name] for side in latents], 1).to(dtype).cpu() for name in latents[0]}

        self._fitting = self._fitting or Fitting(AT_A_TIME, self.device)
        parts = [*self._fitting.parts(range(len(batch)), encoded)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
