"""Samples that hold latents, such as shards that `hookdiff data` has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import define, field
from attrs.validators import in_
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.source import AnySource
from hookdiff.encoding.encoder import INPUTS, STORED, PictureEncoder
from hookdiff.errors import UserError, nearest
from hookdiff.images.sized import Sized
from hookdiff.options.structure import structured

MEAN, STD = "mean", "std"  # columns: n, sides (the picture, its mirror image), and the shape of a latent
ENCODED = "encoded.json"  # the file with the metadata of the samples in a folder: `EncodedSamples`


@define(frozen=True)
class EncodedSamples:
    """The metadata of encoded samples, which a source gives as the table `encoded`."""

    shape: tuple[int, ...]  # of a picture, c h w; if they have several sizes, of a square one
    sides: int = field(validator=in_((1, 2)))  # 2: with the mirror image of each picture
    digests: dict[str, str]  # of the encoders, by name
    columns: tuple[str, ...]  # such as "image.mean"
    # Height and width of the pictures, and the place of each sample's size among them; empty: all have one size.
    sizes: tuple[tuple[int, int], ...] = ()
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, source: AnySource) -> EncodedSamples | None:
        """Return the metadata of the samples of `source`; None if they are not encoded.

        Raises:
            UserError: for metadata that is not valid.
        """
        if (about := source.encoded) is None:
            return None
        try:
            return structured(cls, about)
        except ValueError as error:
            raise UserError(f"encoded: {ENCODED} of the source: {error}") from None

    def sized(self, num: int) -> Sized | None:
        """Return the sizes of `num` samples; None if all have one size.

        Raises:
            UserError: unless each sample has a size.
        """
        if not self.sizes:
            return None
        numbers = torch.tensor(self.numbers)
        if len(numbers) != num or int(numbers.min()) < 0 or int(numbers.max()) >= len(self.sizes):
            known = f"{len(self.numbers):,} samples in {len(self.sizes)} sizes"
            raise UserError(f"encoded: {ENCODED} lists {known}, the source has {num:,}; write the shards again")
        unknown = torch.zeros(num, 2, dtype=torch.int64)
        shapes = [(self.shape[0], *size) for size in self.sizes]
        return Sized(shapes, numbers, unknown, unknown[:, 0] > 0)

    def check(self, encoders: Mapping[str, PictureEncoder]) -> None:
        """Raise UserError unless `encoders` have encoded the samples."""
        for name, encoder in encoders.items():
            if name not in self.digests:
                raise UserError(f"encode.{name}: the samples lack latents of this encoder{nearest(name, self.digests)}")
            if (digest := encoder.digest()) != self.digests[name]:
                raise UserError(
                    f"encode.{name}: another encoder has encoded the samples; restore its options and files: the "
                    f"digest is {digest} now, expected {self.digests[name]}"
                )


@define(frozen=True)
class SourceLatents:
    """The latents of an encoder in the batches of a source: inputs, or conditions `NAME.mean` and `NAME.std`.

    Without `facts`, the inputs are the means of the pictures, without mirror images.
    """

    name: str
    facts: EncodedSamples | None
    describe: Callable[[int], str]  # names a sample

    def sides_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return mean and, if any, deviation of the latents of `batch`, float16: n, sides, and the shape of a latent.

        Raises:
            UserError: if the batch lacks latents, or has latents that are not finite.
        """
        columns = {column: values.to(STORED) for column, values in self.values_of(batch).items()}
        check_finite(f"data.encode.{self.name}", columns, batch, self.describe)
        return columns

    def values_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return mean and, if any, deviation in the dtype of the source."""
        if self.facts is None:
            return {MEAN: batch.inputs[:, None]}
        values = {f"{INPUTS}.{MEAN}": batch.inputs, **batch.conditions}
        wanted = [column for column in (MEAN, STD) if f"{self.name}.{column}" in self.facts.columns]
        if lacking := [name for column in wanted if (name := f"{self.name}.{column}") not in values]:
            raise UserError(f'conditions: add "{lacking[0]}" = "{lacking[0].lower()}.npy"')
        return {column: values[f"{self.name}.{column}"] for column in wanted}

    def is_own(self, condition: str) -> bool:
        """Return whether a condition of the source holds latents of this encoder."""
        return condition in (f"{self.name}.{MEAN}", f"{self.name}.{STD}")


def check_finite(where: str, columns: Mapping[str, Tensor], batch: Batch, describe: Callable[[int], str]) -> None:
    """Raise UserError if `columns` (n rows each, float16), the latents of `batch`, are not all finite."""
    for name, values in columns.items():
        if bad := (~values.flatten(1).isfinite().all(1)).nonzero().flatten().tolist():
            index = 0 if batch.indices is None else int(batch.indices[bad[0]])  # a batch without indices is sample 0
            text = f"{describe(index)} becomes a {name} that is not finite in float16"
            raise UserError(f"{where}: {text}; use an encoder with smaller latents")
