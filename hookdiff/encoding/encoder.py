"""The kind of part `encode`: a frozen network that turns pictures or texts into inputs or conditions of the model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from attrs import define, evolve, field
from attrs.validators import in_, min_len
from torch import Tensor

from hookdiff.errors import UserError
from hookdiff.images.store import Store
from hookdiff.options.choices import Choice
from hookdiff.options.fields import about

INPUTS = "image"  # the name of the encoder of the inputs; any other encoder has the name of a condition
STORED = torch.float16  # the dtype of floats from encoders in tables
CAPTIONS = "text"  # the usual name of the captions of a source


class Encoded(Protocol):
    """The network of an encoder, on its device and in eval mode."""

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and standard deviation of the latents of each of `pictures`.

        Args:
            pictures: n c h w, float32 in [-1, 1], on the device.

        Returns:
            Both have n rows of the shape of a latent, on the device. None as the deviation: the latent is the mean.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures (n c h w, about in [-1, 1]) of `latents` (n rows); needed only for inputs."""


@define(frozen=True)
class Encoder(Choice, ABC):
    """Turns the pictures or the texts of a source into inputs or conditions of the network: see the two subclasses."""

    kind = "encode"

    store: Literal["data", "auto", "memory", "disk", "none"] = field(
        default="data",
        kw_only=True,
        validator=in_(("data", "auto", "memory", "disk", "none")),
        metadata=about(
            'where the output is kept: "data" (as `store` of [data]); "memory" or "disk", both from a file that is '
            'made once; "auto" ("memory" up to `memory_limit`, else "disk"); "none" (encoded anew in each epoch)'
        ),
    )

    def stored(self, store: Store) -> Store:
        """Return where the output of the encoder is kept, in a run with this `store` of [data]."""
        return store if self.store == "data" else evolve(store, store=self.store)

    @property
    def origin(self) -> str:
        """The name of the encoder in messages: its option `path`; default: `use`."""
        return str(getattr(self, "path", self.use))

    @abstractmethod
    def digest(self) -> str:
        """Return a text, such as a hash, that changes with the weights and options of the encoder.

        Raises:
            UserError: if the weights are missing, or are no network of this kind.
        """

    def _not_exported(self, name: str) -> UserError:
        return UserError(
            f"data.encode.{name}: the encoder {self.use!r} cannot be exported to diffusers; use --to safetensors"
        )


@define(frozen=True)
class PictureEncoder(Encoder):
    """Turns the pictures of a source into the inputs of the network, or into a condition."""

    @property
    def draws(self) -> bool:
        """Whether latents are sampled in each epoch if there is a deviation; otherwise the latent is the mean."""
        return True

    @abstractmethod
    def open(self, device: torch.device) -> Encoded:
        """Load the network."""

    def moments(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Return mean and deviation of each channel of the latents; None: the run measures them.

        The run uses them as `diffusion.data_mean` and `data_std`.
        """
        return None

    def to_diffusers(self, mean: Sequence[float], std: Sequence[float]) -> Any:
        """Return the network as a model of diffusers, which `hookdiff export` writes.

        The run trains on z = (latents - mean) / std. `mean` and `std` have one number, or one for each channel. The
        model has this scale in its weights, or in its config: its `decode` takes z / scaling_factor * latents_std +
        latents_mean. The default of latents_std is 1. The default of latents_mean is shift_factor, or 0.

        Raises:
            UserError: if the network cannot be exported, which is the default.
        """
        raise self._not_exported(INPUTS)

    def unchanged_files(self, mean: Sequence[float], std: Sequence[float]) -> Mapping[str, Path]:
        """Return the files that are the result of `to_diffusers`, by their names there; they are copied.

        Empty, which is the default, if the network is written anew.
        """
        return {}


Scale = tuple[Sequence[float], Sequence[float]]  # mean and deviation, one number or one for each channel


def is_same_scale(scale: Scale, other: Scale) -> bool:
    """Return whether both scales give the same latents, up to rounding."""
    pairs: list[tuple[float, float]] = []
    for ours, theirs in zip(scale, other, strict=True):
        num = max(len(ours), len(theirs))
        if {len(ours), len(theirs)} - {1, num}:
            return False
        pairs += zip(*([*side] * (num // len(side)) for side in (ours, theirs)), strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in pairs)


def scale_text(scale: Scale) -> str:
    """Return a scale as its keys in [diffusion]."""
    texts = (", ".join(f"{value:.6g}" for value in values) for values in scale)
    return "data_mean = [{}] and data_std = [{}]".format(*texts)


class EncodedTexts(Protocol):
    """The network of an encoder of texts, in eval mode."""

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the conditions of `texts`, n rows each, on any device, float, bool or int64.

        The name of a condition is the name of the encoder and a key: "" for the tokens (n tokens features), or a key
        that begins with "_", such as "_mask" for their mask (n tokens, bool). Names, and shapes and dtypes of rows,
        must be the same for all texts.
        """


class TokenCounts(Protocol):
    """The optional members of `EncodedTexts`."""

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the number of tokens of each text before truncation. An encoder with a `limit` needs this."""

    def tokens(self, texts: Sequence[str]) -> Sequence[Sequence[int | None]]:
        """Return the tokens of each text after truncation and without padding; None stands for an unknown word.

        Default: no warning about texts that have the same tokens, or no known words.
        """


@define(frozen=True)
class TextNetwork:
    """A network of a text encoder with all members; None stands for a missing member."""

    encode: Callable[[Sequence[str]], Mapping[str, Tensor]]
    lengths: Callable[[Sequence[str]], Sequence[int]] | None
    tokens: Callable[[Sequence[str]], Sequence[Sequence[int | None]]] | None

    @classmethod
    def of(cls, network: EncodedTexts | TextNetwork) -> TextNetwork:
        """Return `network` as a TextNetwork."""
        if isinstance(network, TextNetwork):
            return network
        return cls(network.encode, getattr(network, "lengths", None), getattr(network, "tokens", None))


@define(frozen=True)
class ExportedTexts:
    """A text encoder for diffusers, which `hookdiff export` writes, and the code that encodes prompts with it."""

    parts: Mapping[str, Any]  # networks of transformers and tokenizers, by their names in a pipeline
    code: str  # loads the parts from their folder, and encodes the list `prompts`
    conditions: Mapping[str, tuple[str, str]]  # by name: expressions, after `code`, for prompts and for no prompts
    pipeline: str = ""  # class that encodes prompts in the same way, with parts of these names; "": none
    files: Mapping[str, Mapping[str, Path]] = field(factory=dict)  # by part: files to copy, by name; others are written


@define(frozen=True)
class TextEncoder(Encoder):
    """Turns the captions of a source into conditions. The conditions of an empty text stand for no caption."""

    texts: str = field(
        default=CAPTIONS,
        alias="of",
        kw_only=True,
        validator=min_len(1),
        metadata=about("name of the source's captions that are encoded"),
    )

    @property
    def limit(self) -> int | None:
        """The number of tokens to which texts are truncated; None: no truncation."""
        return None

    @property
    def time_ids(self) -> bool:
        """Whether the model also gets size and crop of each picture, as the condition NAME_time_ids; see TimeIds."""
        return False

    @property
    def keywords(self) -> Mapping[str, str]:
        """A network's keywords for the conditions, by what follows the name of the encoder, as {"_mask": "mask"}.

        Empty if the encoder does not know the network.
        """
        return {}

    @abstractmethod
    def open(self, device: torch.device) -> EncodedTexts:
        """Load the network, which may also have the members of `TokenCounts`."""

    def opened(self, device: torch.device) -> TextNetwork:
        """Return the network of `open` as a TextNetwork."""
        return TextNetwork.of(self.open(device))

    def to_diffusers(self, name: str, folder: str) -> ExportedTexts:
        """Return the models of the encoder `name`, and code that loads them from `folder`, where they will be written.

        Raises:
            UserError: if the encoder cannot be exported, which is the default.
        """
        raise self._not_exported(name)


@define(frozen=True, kw_only=True)
class EncoderKeys:
    """The encoders of [data]."""

    encode: Mapping[str, Encoder] | None = field(
        default=None,
        metadata=about(
            "encoders of the samples, by name: `image` for the inputs of the network; any other name is the name "
            "of a condition"
        ),
    )
    encoded: bool = field(
        default=False,
        metadata=about(
            "the samples are latents of the encoders already, such as shards of `hookdiff data --to-shards`, or an "
            "array of means: they are sampled, scaled and decoded, but not encoded"
        ),
    )
    time_ids: bool = field(
        default=False,
        metadata=about(
            "adds the condition `time_ids`, as SDXL takes it: height and width of the picture, top and left of its "
            "cut, height and width of the sample"
        ),
    )

    @property
    def of_pictures(self) -> dict[str, PictureEncoder]:
        """The encoders of pictures, by name."""
        return {name: part for name, part in (self.encode or {}).items() if isinstance(part, PictureEncoder)}

    @property
    def of_texts(self) -> dict[str, TextEncoder]:
        """The encoders of texts, by name."""
        return {name: part for name, part in (self.encode or {}).items() if isinstance(part, TextEncoder)}
