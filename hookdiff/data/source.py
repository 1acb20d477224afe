"""The two protocols of data sources, and functions that read a picture."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, BinaryIO, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from hookdiff.data.decode import Unreadable
from hookdiff.data.formats import known
from hookdiff.disk import check_kind
from hookdiff.errors import StorageError, shown

Result = TypeVar("Result")


@runtime_checkable
class Images(Protocol):
    """Pictures as they are stored; the transforms of [data] turn them into samples. `folder.py` is an example.

    `load(i)` returns a Pillow image, or uint8 pixels, c h w or h w. A Pillow image may still be lazy: before training
    only its header is read. `load` may raise any error for a picture that cannot be read, and StorageError if the disk
    or a server fails, which ends the run. It is called from several processes, which were forked or got a pickle.

    Optional attributes: `shape` (c, h, w), if all samples have the same, so that their headers are not read;
    `known_kinds()`, the `Kind`s of pictures with a known header, and the positions of all others, of which the headers
    are read; `fingerprint()`, a string that changes with the data, for the store "disk"; `one_at_a_time`, True if one
    process alone must read all pictures before training; `problems`, a list of what is wrong with the labels, say: all
    of it is reported together with what is wrong with the pictures, and no run starts; `passed_over`, what lies among
    the pictures and is none: by kind, the number and the name of the first one, which is logged.
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
    * A dict has the picture under "image" or "inputs", and may have an integer under "label". All else becomes
      `Batch.conditions`, under its key.
    * In a tuple the picture comes first. An integer in the second place is the label; all else becomes a condition,
      named `item1`, `item2`, ... by its place.

    Conditions are tensors, arrays, numbers or lists of numbers, of one shape and dtype in all samples, or Pillow
    images. An image of the height and width of the picture (h w or c h w) is resized, cropped and flipped with it, and
    becomes float32 in [-1, 1] if it is uint8. All others are passed on as they are.

    `source[i]` may augment with numbers from `random`, `numpy.random` and torch's default generator: all three are
    seeded for the sample. The attributes `labels`, `classes` and `describe` are optional, and the same as in `Images`.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def open_picture(file: str | BinaryIO) -> Any:
    """Return the Pillow image in a file, of which only the header is read.

    Raises OSError and any error of Pillow; OSError for a pipe, a socket or a device, and for other formats than those
    in `formats.py`: for PostScript, Pillow would run Ghostscript, whatever the name of the file.
    """
    from PIL import Image

    if isinstance(file, str):
        check_kind(file)
    return Image.open(file, formats=[one.names[0] for one in known()])


def name_of(source: object, index: int) -> str:
    """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""
    return shown(source.describe(index)) if hasattr(source, "describe") else f"sample {index}"


def with_image(source: Images, index: int, function: Callable[[Any], Result]) -> Result:
    """Return `function(picture)` for the picture at `index`, and close its file.

    Raises Unreadable for any error but a StorageError, which is not about this picture alone.
    """
    try:
        image = source.load(index)
        with image if hasattr(image, "fp") else nullcontext():
            return function(image)
    except StorageError:
        raise
    except Exception as error:  # a decoder may raise any error on broken bytes
        raise Unreadable(f"{name_of(source, index)}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the message of a decoder's error, on one line."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "no picture of a known format"
    # Without the path, since callers put it before the message.
    message = str(getattr(error, "strerror", None) or error).partition("\n")[0].removesuffix(".")
    kind = "" if message and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return shown(kind + message)
