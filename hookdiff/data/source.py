"""The protocols of data sources, and the adapter that gives each source all members with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.memory import InMemory
from hookdiff.errors import shown

NamedCaptions = Mapping[str, Sequence[Sequence[str]]]  # the captions of each sample, by the name of their kind
Value = TypeVar("Value")


@runtime_checkable
class Images(Protocol):
    """Pictures as they are stored; the transforms of [data] turn them into samples. `images/folder.py` is an example.

    `load(i)` returns a Pillow image, or uint8 pixels, c h w or h w. A Pillow image may still be lazy: before training
    only its header is read. `load` may raise any error for an unreadable picture, but StorageError, which ends the
    run, if the disk or a server fails. Several processes call `load`: they are forked, or get the source as a pickle.

    `SourceOptions` lists the optional members.
    """

    labels: Tensor | None  # n, int64, from 0; -1: unknown
    classes: Sequence[str] | None  # the names of the labels

    def __len__(self) -> int: ...

    def load(self, index: int, /) -> Any:
        """Return the picture at `index`."""

    def describe(self, index: int, /) -> str:
        """Return the name of the sample for messages, such as its file."""


@runtime_checkable
class Source(Protocol):
    """A map-style data set: `source[i]` is a picture, or a tuple or dict with a picture and other values.

    * A picture is a tensor c h w, uint8 or floats in [-1, 1], or a Pillow image. A tensor of another shape, such as a
      vector or tokens, is taken as it is.
    * A dict has the picture under "image" or "inputs", and may have an integer under "label", or under the `image_key`
      and the `label_key` of `feed_of`. Other values become `Batch.conditions`, under their keys.
    * In a tuple the picture comes first. An integer in the second place is the label; other values become conditions,
      named `item1`, `item2`, ... by their places.

    Conditions are tensors, arrays, numbers or lists of numbers, of one shape and dtype in all samples, or Pillow
    images. An image of the height and width of the picture (h w or c h w) is resized, cropped and flipped with it, and
    becomes float32 in [-1, 1] if it is uint8. All other conditions stay the same. A value that is a text or a list of
    texts in all samples holds captions: a config with text encoders uses them as `texts`, under the same name.

    `source[i]` may augment with numbers from `random`, `numpy.random` and torch's default generator: all three are
    seeded for the sample. The attributes `labels`, `classes` and `describe` are optional, as in `Images`.
    `SourceOptions` lists other optional members.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class SourceOptions(Protocol):
    """The optional members of `Images`, with their defaults; a `Source` may have those that apply to it."""

    shape: tuple[int, ...] | None  # c h w, if all samples have the same shape: no header is read; default: None
    one_at_a_time: bool  # one process alone must read all pictures before training; default: False
    # Faults, such as wrong labels. They are reported together with faulty pictures, and no run starts.
    # Default: none.
    problems: Sequence[str]
    # Files that are no pictures, for the log: the number and the first name of each kind. Default: none.
    passed_over: Mapping[str, tuple[int, str]]
    encoded: Mapping[str, Any] | None  # the content of encoded.json, if samples are already encoded; default: None

    @property
    def texts(self) -> NamedCaptions | None:
        """The captions of each sample in order, by kind; empty for a sample without captions. Default: None.

        The property may read the captions at its first use, and may raise UserError. A run without text encoders does
        not use it. A source with one kind of captions names it `text`.
        """

    def fingerprint(self) -> str | None:
        """Return a string that changes with the data, for the store "disk"; default: None."""

    def known_kinds(self) -> tuple[Sequence[Any], Sequence[int]]:
        """Return a `Kind` of each known mode and size, and the positions of other pictures. Default: none is known."""

    def known_sizes(self) -> Tensor:
        """Return height and width of each picture (n 2, int64); 0 for an unknown header. Default: all are 0."""


class _Option(Generic[Value]):
    """An attribute of the `origin` of a source, with its default."""

    def __init__(self, default: Value) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, source: AnySource, owner: type) -> Value:
        value: Value = getattr(source.origin, self.name, self.default)
        return value


@define(eq=False, slots=False)
class AnySource:
    """Wraps the source `origin` of a user, and has every member of a source. Workers get it as a pickle."""

    origin: Any  # `InMemory`, `Images` or `Source`, perhaps with some of `SourceOptions`
    kind: str = field(init=False)  # the name of its class
    memory: InMemory | None = field(init=False)  # `origin`, if it is in memory
    is_images: bool = field(init=False)

    labels = _Option[Any](None)
    classes = _Option[Sequence[str] | None](None)
    shape = _Option[tuple[int, ...] | None](None)
    one_at_a_time = _Option(False)
    problems = _Option[Sequence[str]](())
    passed_over = _Option[Mapping[str, tuple[int, str]]]({})
    encoded = _Option[Any](None)

    def __attrs_post_init__(self) -> None:
        self.kind = type(self.origin).__qualname__
        self.origin = InMemory(self.origin) if isinstance(self.origin, Tensor) else self.origin
        self.memory = self.origin if isinstance(self.origin, InMemory) else None
        self.is_images = self.memory is None and isinstance(self.origin, Images)

    @classmethod
    def of(cls, source: Any) -> AnySource:
        """Return `source` as an AnySource, which has every member of a source."""
        return source if isinstance(source, AnySource) else cls(source)

    @property
    def items(self) -> Any:
        """The source as `Feed.samples` shows it."""
        return self.origin

    def __len__(self) -> int:
        return len(self.origin)

    def __getitem__(self, index: int) -> Any:
        return self.origin[index]

    def load(self, index: int) -> Any:
        """Return the picture at `index` of `Images`."""
        return self.origin.load(index)

    def describe(self, index: int) -> str:
        return str(self.origin.describe(index)) if hasattr(self.origin, "describe") else f"sample {index}"

    def name_of(self, index: int) -> str:
        """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""
        return shown(self.describe(index))

    @property
    def texts(self) -> NamedCaptions | None:
        texts: NamedCaptions | None = getattr(self.origin, "texts", None)
        return texts

    def fingerprint(self) -> str | None:
        fingerprint: str | None = getattr(self.origin, "fingerprint", lambda: None)()
        return fingerprint

    def known_kinds(self) -> tuple[Sequence[Any], Sequence[int]]:
        known: Callable[[], tuple[Sequence[Any], Sequence[int]]] | None = getattr(self.origin, "known_kinds", None)
        return ([], range(len(self))) if known is None else known()

    def known_sizes(self) -> Tensor:
        known: Callable[[], Tensor] | None = getattr(self.origin, "known_sizes", None)
        return torch.zeros(len(self), 2, dtype=torch.int64) if known is None else known()
