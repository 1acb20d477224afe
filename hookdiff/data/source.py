"""The protocols of data sources, and the adapter that gives a source of any kind all that is asked of one."""

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

    `SourceOptions` lists what is optional.
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
      and the `label_key` of `feed_of`. All else becomes `Batch.conditions`, under its key.
    * In a tuple the picture comes first. An integer in the second place is the label; all else becomes a condition,
      named `item1`, `item2`, ... by its place.

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
    """What `Images`, and as far as it applies a `Source`, may have: each member is optional and has a default."""

    shape: tuple[int, ...] | None  # c h w, if all samples have the same: then no header is read; default: None
    one_at_a_time: bool  # one process alone must read all pictures before training; default: False
    # What is wrong with the labels, say. It is reported together with what is wrong with the pictures, and no run
    # starts; default: nothing.
    problems: Sequence[str]
    # What lies among the pictures and is none, which is logged: by kind, the number and the name of the first one.
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
    """An attribute that is read from `given` when it is asked for, with its default."""

    def __init__(self, default: Value) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, source: AnySource, owner: type) -> Value:
        value: Value = getattr(source.given, self.name, self.default)
        return value


@define(eq=False, slots=False)
class AnySource:
    """The source `given` with every member that is asked of one; it goes to workers as a pickle."""

    given: Any  # `InMemory`, `Images` or `Source`, perhaps with some of `SourceOptions`
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
        self.kind = type(self.given).__qualname__
        self.given = InMemory(self.given) if isinstance(self.given, Tensor) else self.given
        self.memory = self.given if isinstance(self.given, InMemory) else None
        self.is_images = self.memory is None and isinstance(self.given, Images)

    @classmethod
    def of(cls, source: Any) -> AnySource:
        """Return a source with every member; one that has them as it is."""
        return source if isinstance(source, AnySource) else cls(source)

    @property
    def items(self) -> Any:
        """The source as `Feed.samples` shows it."""
        return self.given

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        return self.given[index]

    def load(self, index: int) -> Any:
        """Return the picture at `index` of `Images`."""
        return self.given.load(index)

    def describe(self, index: int) -> str:
        return str(self.given.describe(index)) if hasattr(self.given, "describe") else f"sample {index}"

    def name_of(self, index: int) -> str:
        """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""
        return shown(self.describe(index))

    @property
    def texts(self) -> NamedCaptions | None:
        texts: NamedCaptions | None = getattr(self.given, "texts", None)
        return texts

    def fingerprint(self) -> str | None:
        found: str | None = getattr(self.given, "fingerprint", lambda: None)()
        return found

    def known_kinds(self) -> tuple[Sequence[Any], Sequence[int]]:
        known: Callable[[], tuple[Sequence[Any], Sequence[int]]] | None = getattr(self.given, "known_kinds", None)
        return ([], range(len(self))) if known is None else known()

    def known_sizes(self) -> Tensor:
        known: Callable[[], Tensor] | None = getattr(self.given, "known_sizes", None)
        return torch.zeros(len(self), 2, dtype=torch.int64) if known is None else known()
