"""The two protocols of data sources."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hookdiff.errors import shown


@runtime_checkable
class Images(Protocol):
    """Pictures as they are stored; the transforms of [data] turn them into samples. `folder.py` is an example.

    `load(i)` returns a Pillow image, or uint8 pixels, c h w or h w. A Pillow image may still be lazy: before training
    only its header is read. `load` may raise any error for a picture that cannot be read, and StorageError if the disk
    or a server fails, which ends the run. It is called from several processes, which were forked or got a pickle.

    Optional attributes: `shape` (c, h, w), if all samples have the same, so that their headers are not read;
    `known_kinds()`, the `Kind`s of pictures with a known header, and the positions of all others, of which the headers
    are read; `known_sizes()`, height and width of each picture with a known header (n 2, int64), zeros of the others;
    `fingerprint()`, a string that changes with the data, for the store "disk"; `one_at_a_time`, True if one process
    alone must read all pictures before training; `problems`, a list of what is wrong with the labels, say: all
    of it is reported together with what is wrong with the pictures, and no run starts; `passed_over`, what lies among
    the pictures and is none: by kind, the number and the name of the first one, which is logged; `texts`, the captions:
    by name, for each sample a sequence of one or more in order, empty for a sample without any; None if there are none.
    It may be a property that reads them at its first use, and may raise UserError then: a run that encodes no text does
    not ask for it. A source of one kind of captions calls it `text`.
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
    seeded for the sample. The attributes `labels`, `classes`, `texts` and `describe` are optional, and the same as in
    `Images`.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def sample_name(source: object, index: int) -> str:
    """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""
    return shown(source.describe(index)) if hasattr(source, "describe") else f"sample {index}"
