"""The protocols of data sources, and the adapter that gives each source all members with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.memory import InMemory
from hookdiff.errors import shown

NamedCaptions = Mapping[str, Sequence[Sequence[str]]]  # by the name of a kind of captions, those of each sample
Value = TypeVar("Value")


@runtime_checkable
class Images(Protocol):
    """Pictures as they are stored; the transforms of [data] turn them into samples. `folder.py` is an example.

    `load(i)` returns a Pillow image, or uint8 pixels, c h w or h w. A Pillow image may still be lazy: before training
    only its header is read. `load` may raise any error for a picture that cannot be read, and StorageError if the disk
    or a server fails, which ends the run. It is called from several processes, which were forked or got a pickle.

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
    """A map-style data set: `source[i]` is a picture, or a tuple or dict with a picture and more.

    * A picture is a tensor c h w, uint8 or floats in [-1, 1], or a Pillow image. A tensor of another shape, such as a
      vector or tokens, is taken as it is.
    * A dict has the picture under "image" or "inputs", and may have an integer under "label", or under the `image_key`
      and the `label_key` of `feed_of`. Other values become `Batch.conditions`, under their keys.
    * In a tuple the picture comes first. An integer in the second place is the label; other values become conditions,
      named `item1`, `item2`, ... by their places.

    Conditions are tensors, arrays, numbers or lists of numbers, of one shape and dtype in all samples, or Pillow
    images. An image of the height and width of the picture (h w or c h w) is resized, cropped and flipped with it, and
    becomes float32 in [-1, 1] if it is uint8. All others are passed on as they are. A text or a list of texts, in all
    samples, are captions: in a config with encoders of texts they are `texts`, by their names.

    `source[i]` may augment with numbers from `random`, `numpy.random` and torch's default generator: all three are
    seeded for the sample. The attributes `labels`, `classes` and `describe` are optional, and the same as in `Images`;
    `SourceOptions` lists the others.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class SourceOptions(Protocol):
    """The optional members of `Images`, with their defaults; a `Source` may have those that apply to it."""

    shape: tuple[int, ...] | None  # c h w, if all samples have the same: then no header is read; default: None
    one_at_a_time: bool  # one process alone must read all pictures before training; default: False
    # Faults, such as those of labels. They are reported together with those of the pictures, and no run starts;
    # default: none.
    problems: Sequence[str]
    # Other files among the pictures, which are logged: by kind, their number and the name of the first. Default: none.
    passed_over: Mapping[str, tuple[int, str]]
    encoded: Mapping[str, Any] | None  # the table encoded.json, of samples that are encoded already; default: None

    @property
    def texts(self) -> NamedCaptions | None:
        """The captions: for each sample one or more in order, empty for a sample without any; default: None.

        It may read them at its first use, and may raise UserError then: a run that encodes no text does not ask for it.
        A source of one kind of captions calls it `text`.
        """

    def fingerprint(self) -> str | None:
        """Return a string that changes with the data, for the store "disk"; default: None."""

    def known_kinds(self) -> tuple[Sequence[Any], Sequence[int]]:
        """Return each `Kind` with a known header, and the positions of all other pictures. Default: all are others."""

    def known_sizes(self) -> Tensor:
        """Return height and width of each picture with a known header (n 2, int64), else zeros; default: zeros."""


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
    """The source `origin` of a user with every member of a source; it goes to workers as a pickle."""

    origin: Any  # `InMemory`, `Images` or `Source`, perhaps with some of `SourceOptions`
    kind: str = field(init=False)  # the name of its class
    memory: InMemory | None = field(init=False)  # the set itself, if it is one in memory
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
        """Return `source` with every member of a source."""
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
