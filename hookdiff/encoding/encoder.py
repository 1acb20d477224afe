"""The kind of part `encode`: a frozen network that turns pictures or texts into inputs or conditions of another."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
            Both n and the shape of a latent, on the device; None as the deviation: the mean is taken.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures (n c h w, about in [-1, 1]) of `latents` (n and their shape); only for inputs."""


@define(frozen=True)
class Encoder(Choice, ABC):
    """Turns the pictures or the texts of a source into inputs or conditions of the network: see the two subclasses."""

    kind = "encode"

    store: Literal["data", "auto", "memory", "disk", "none"] = field(
        default="data",
        kw_only=True,
        validator=in_(("data", "auto", "memory", "disk", "none")),
        metadata=about(
            'where its output is kept: "data" (as `store` of [data]); "memory" or "disk", both from a file that is '
            'made once; "auto" ("memory" up to `memory_limit`, else "disk"); "none" (encoded anew in each epoch)'
        ),
    )

    def stored(self, store: Store) -> Store:
        """Return where its output is kept, in a run with this `store` of [data]."""
        return store if self.store == "data" else evolve(store, store=self.store)

    @property
    def origin(self) -> str:
        """The name of the encoder in messages: its option `path`; default: `use`."""
        return str(getattr(self, "path", self.use))

    @abstractmethod
    def digest(self) -> str:
        """Return a text, such as a hash, of the weights and options on which its values depend.

        Raises:
            UserError: if the weights are not here, or are no network of this kind.
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
        """Whether latents are drawn anew in each epoch, if the network returns a deviation; else the mean is taken."""
        return True

    @abstractmethod
    def open(self, device: torch.device) -> Encoded:
        """Load the network."""

    def moments(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Return mean and deviation of each channel of the latents; None: they are measured.

        They become `diffusion.data_mean` and `data_std`.
        """
        return None

    def to_diffusers(self, mean: Sequence[float], std: Sequence[float]) -> Any:
        """Return the network as a model of diffusers, which `hookdiff export` writes.

        The run trains on z = (latents - mean) / std. `mean` and `std` have one number, or one for each channel. The
        model has this scale in its weights, or in its config: its `decode` takes z / scaling_factor * latents_std +
        latents_mean; without latents_std that is 1, and without latents_mean it is shift_factor, or else 0.

        Raises:
            UserError: if it cannot be exported, as by default.
        """
        raise self._not_exported(INPUTS)


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

        The name of a condition is that of the encoder and a key: "" for the tokens (n tokens features), or one that
        begins with "_", as "_mask" for their mask (n tokens, bool). In all calls, whatever the texts,
        names, shapes and dtypes of rows are the same.
        """


class TokenCounts(Protocol):
    """The optional members of `EncodedTexts`."""

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the number of tokens of each text before it is cut. An encoder with a `limit` needs it."""

    def tokens(self, texts: Sequence[str]) -> Sequence[Sequence[int | None]]:
        """Return the tokens of each text as they are encoded: cut and not filled, None for an unknown word.

        Default: no warning of texts that have the same tokens, or no known ones.
        """


@define(frozen=True)
class TextNetwork:
    """The network of an encoder of texts with every member; None for a member that it lacks."""

    encode: Callable[[Sequence[str]], Mapping[str, Tensor]]
    lengths: Callable[[Sequence[str]], Sequence[int]] | None
    tokens: Callable[[Sequence[str]], Sequence[Sequence[int | None]]] | None

    @classmethod
    def of(cls, network: EncodedTexts | TextNetwork) -> TextNetwork:
        """Return `network` with every member of a TextNetwork."""
        if isinstance(network, TextNetwork):
            return network
        return cls(network.encode, getattr(network, "lengths", None), getattr(network, "tokens", None))


@define(frozen=True)
class ExportedTexts:
    """An encoder of texts for diffusers, which `hookdiff export` writes, and the code that encodes with it."""

    parts: Mapping[str, Any]  # networks of transformers and tokenizers, by their names in a pipeline
    code: str  # opens them in their folder, and encodes the list `prompts`
    conditions: Mapping[str, tuple[str, str]]  # by name, expressions after that code: of the prompts, and of no prompts
    pipeline: str = ""  # class that encodes a prompt in the same way, with its parts of these names; "": none


@define(frozen=True)
class TextEncoder(Encoder):
    """Turns the captions of a source into conditions. Those of an empty text stand for no caption."""

    texts: str = field(
        default=CAPTIONS,
        alias="of",
        kw_only=True,
        validator=min_len(1),
        metadata=about("name of the captions of the source that it encodes"),
    )

    @property
    def limit(self) -> int | None:
        """The number of tokens at which a text is cut; None: texts are not cut."""
        return None

    @property
    def time_ids(self) -> bool:
        """Whether its network also gets sizes and crop of each picture, as the condition NAME_time_ids: see TimeIds."""
        return False

    @abstractmethod
    def open(self, device: torch.device) -> EncodedTexts:
        """Load the network, which may have `TokenCounts` too."""

    def opened(self, device: torch.device) -> TextNetwork:
        """Return the network of `open` with every member."""
        return TextNetwork.of(self.open(device))

    def to_diffusers(self, name: str, folder: str) -> ExportedTexts:
        """Return the parts of the encoder `name`, and code that finds them in `folder`, where they will be written.

        Raises:
            UserError: if it cannot be exported, as by default.
        """
        raise self._not_exported(name)


@define(frozen=True, kw_only=True)
class EncoderKeys:
    """The encoders of [data]."""

    encode: Mapping[str, Encoder] | None = field(
        default=None,
        metadata=about(
            "encoders of the samples, by name: `image` for the inputs of the network; any other name is that of a "
            "condition"
        ),
    )
    encoded: bool = field(
        default=False,
        metadata=about(
            "the samples hold latents of the encoders, as shards of `hookdiff data --to-shards` do, or an array of "
            "means: they are drawn, scaled and decoded, and not encoded"
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
