"""The protocols of readers, from which a Feed gets its samples, and of codecs, captions and their encoders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import InMemory
from hookdiff.data.source import AnySource, Images, Source

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed

# The samples of a batch, one per row: inputs for the objective, labels (int64), positions (int64, CPU), and
# conditions by name.
Stack = tuple[Tensor, Tensor | None, Tensor, Mapping[str, Tensor]]
Parts = Sequence[Tensor]  # the samples to train on and those held out: n, int64, positions in the whole set
Kind = TypeVar("Kind")


class InputEncoder(Protocol):
    """The part of the config that opens the network of a codec: see `hookdiff.encoding.PictureEncoder`."""

    def moments(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Return mean and deviation of each channel of the latents; None: the run measures them."""

    def to_diffusers(self, mean: Sequence[float], std: Sequence[float]) -> Any:
        """Return the network as a model of diffusers, with the scale of the run in it."""

    def unchanged_files(self, mean: Sequence[float], std: Sequence[float]) -> Mapping[str, Path]:
        """Return the files that are the result of `to_diffusers`, by their names there; empty: it is written anew."""


class Codec(Protocol):
    """Encodes pictures to latents, which a run trains on, and decodes latents to pictures."""

    shape: tuple[int, ...]  # of a picture, c h w
    digest: str  # a hash that changes with the latents

    @property
    def encoder(self) -> InputEncoder: ...

    @property
    def pictures(self) -> Feed:
        """The Feed of the pictures, which is opened at the first use."""

    def encode(self, pictures: Tensor) -> Tensor:
        """Return the latents (n c h w) of `pictures` (n c h w in [-1, 1]) on the same device, without randomness."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures (n c h w, float32, about in [-1, 1]) of `latents` (n c h w), on the same device."""


class CaptionEncoder(Protocol):
    """The part of the config that opens an encoder of texts: see `hookdiff.encoding.TextEncoder`."""

    def to_diffusers(self, name: str, folder: str) -> Any:
        """Return the models of the encoder `name`, and the code that loads them from `folder`."""


class TextEncoders(Protocol):
    """The text encoders of a run, which turn captions and prompts into conditions."""

    @property
    def encoders(self) -> Mapping[str, CaptionEncoder]:
        """The parts of the config, by name."""

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of captions that the encoders take, such as "text"."""

    @property
    def nothing(self) -> Mapping[str, Tensor | None]:
        """The conditions that stand for no caption, by name; None: the condition stays as it is."""

    def embed(self, texts: Mapping[str, Sequence[str]], are_prompts: bool = True) -> dict[str, Tensor]:
        """Return the conditions of `texts` (n of each kind), by name, with n rows each."""

    def of_size(self, size: Sequence[int], num: int) -> dict[str, Tensor]:
        """Return the conditions, by name, that depend on height and width alone, of `num` pictures of this `size`."""


class Captions(Protocol):
    """The captions of all samples, under one name of the source."""

    originals: Sequence[Sequence[str]]  # the captions of each sample, as the source has them

    def every(self) -> Iterable[str]:
        """Yield the captions of all usable samples."""

    def drawn(self, indices: Tensor, seed: int, epoch: int | None) -> list[str]:
        """Return a caption of each of the samples `indices`: a random caption; if `epoch` is None, the first one."""


class Reader(Protocol):
    """Reads, decodes and augments the samples of a Feed. The Feed keeps their order and makes the batches.

    `MemoryReader` reads samples in memory; `hookdiff.images` has the reader of pictures and of any other source. The
    members of `PlainReader` are optional: a reader that derives from this class has their defaults.
    """

    @property
    def samples(self) -> InMemory | Images | Source:
        """The `InMemory` set that holds all samples, or the source that reads each of them."""

    @property
    def labels(self) -> Tensor | None:
        """The labels of the whole set: n, int64, on the CPU (-1: unknown)."""

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes."""

    @property
    def left_out(self) -> Sequence[str]:
        """The parts of the source that are not used, in words."""

    @property
    def unreadable(self) -> Collection[int]:
        """Positions of samples that no batch may hold."""

    @property
    def codec(self) -> Codec | None:
        """The codec that encodes pictures to samples; None if the samples are not encoded."""

    @property
    def inner(self) -> Reader | None:
        """The reader that this reader wraps. Optional; None by default."""

    @property
    def source(self) -> AnySource | None:
        """The source, if `samples` is not the source. Optional; None by default."""

    @property
    def cache_dir(self) -> str | None:
        """Folder for files about the samples. Optional; by default the user's cache folder."""

    @property
    def captions(self) -> Mapping[str, Captions]:
        """The captions, by their names in the source. Optional; none by default."""

    @property
    def texts(self) -> TextEncoders | None:
        """The encoders of the captions. Optional; None by default."""

    @property
    def nothing(self) -> Mapping[str, Tensor | None]:
        """The values that stand for missing conditions, by name. Optional; by default zeros for all."""

    @property
    def digests(self) -> Mapping[str, str]:
        """The digests of all encoders, by name. Optional; none by default."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the samples. Optional; empty by default: all have one shape."""

    @property
    def shape_numbers(self) -> Tensor | None:
        """The place in `shapes` of the shape of each sample: n, int64, on the CPU. Optional; None: all have one shape.

        A part that `stacks` gets then has samples of one shape.
        """

    def __len__(self) -> int:
        """Return the number of samples in the whole set."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, c h w. If the source does not give it, the first sample is read.

        If samples have several shapes, this is the square that gives networks their arguments.
        """

    @property
    def first(self) -> Batch:
        """A batch of the first sample. If samples are pictures without conditions, its pixels may be zeros."""

    @property
    def are_pictures(self) -> bool:
        """Whether the samples are pictures with values in [-1, 1], not vectors or latents."""

    def bound(self, seed: int, device: torch.device, parts: Parts) -> Reader:
        """Return a copy that reads for a run with this seed, on this device."""

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        """Yield the samples at each of `shares` (n, int64), augmented as in `epoch`; None: without augmentation."""

    def texts_of(self, indices: Tensor) -> dict[str, list[str]]:
        """Return lists of the first captions of the samples `indices`, by kind of caption. Optional method."""

    def check(self) -> None:
        """Raise UserError for samples that do not fit the options."""

    def describe(self, index: int) -> str:
        """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""

    def fingerprint(self) -> str | None:
        """Return a hash that changes with the samples without augmentation; None if there is none."""

    def close(self) -> None:
        """End the workers that wait for the next epoch, which will start new workers."""


class ReaderAround:
    """A reader that has all members of the reader `inner`; subclasses change some members."""

    inner: Reader

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def samples(self) -> InMemory | Images | Source:
        return self.inner.samples

    @property
    def labels(self) -> Tensor | None:
        return self.inner.labels

    @property
    def classes(self) -> Sequence[str] | None:
        return self.inner.classes

    @property
    def left_out(self) -> Sequence[str]:
        return self.inner.left_out

    @property
    def unreadable(self) -> Collection[int]:
        return self.inner.unreadable

    @property
    def codec(self) -> Codec | None:
        return self.inner.codec

    @property
    def source(self) -> AnySource | None:
        return self.inner.source

    @property
    def cache_dir(self) -> str | None:
        return self.inner.cache_dir

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self.inner.shapes

    @property
    def shape_numbers(self) -> Tensor | None:
        return self.inner.shape_numbers

    @property
    def are_pictures(self) -> bool:
        return self.inner.are_pictures

    def check(self) -> None:
        self.inner.check()

    def describe(self, index: int) -> str:
        return self.inner.describe(index)

    def close(self) -> None:
        self.inner.close()


def find_reader(feed: Feed, kind: type[Kind]) -> Kind | None:
    """Return the reader of `feed`, or a reader that it wraps, of the class `kind`; None if there is none."""
    reader: Reader | None = feed.reader
    while reader is not None and not isinstance(reader, kind):
        reader = reader.inner
    return reader
