"""What pictures come from: the two kinds of source, and reading one sample of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from os import cpu_count
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from hookdiff.data.decode import Unreadable
from hookdiff.data.transforms import Transforms

_CHUNK = 64  # samples that a thread takes at a time

Made = TypeVar("Made")


@runtime_checkable
class Images(Protocol):
    """Pictures as they are stored, which the transforms of [data] make samples of. `folder.py` is one to copy.

    `load(i)` returns a Pillow image that may still be lazy (only its header is looked at before training), or uint8
    pixels, c h w or h w, and may raise anything for one that cannot be read. It is called from several threads and
    processes.

    What it may have besides: `shape` (c, h, w), where all samples have it, so that none is opened to find out;
    `fingerprint()`, a string that changes with the data, which keeping them on disk needs; `one_at_a_time`, True where
    a process must call `load` from one thread alone.
    """

    labels: Tensor | None  # n, int64, from 0; -1: unknown
    classes: Sequence[str] | None  # the names of the labels

    def __len__(self) -> int: ...

    def load(self, index: int, /) -> Any:
        """Return the picture at `index`."""

    def describe(self, index: int, /) -> str:
        """Return what a user knows the sample by, such as its file."""


@runtime_checkable
class Source(Protocol):
    """A map-style data set: `source[i]` is a picture, or a pair of one and its label.

    A picture is a tensor c h w, uint8 or floats in [-1, 1], or a Pillow image. A `source[i]` that augments may draw
    from `random`, `numpy.random` and torch's default generator: all three are seeded for the sample. `labels`,
    `classes` and `describe` may be there as for `Images`.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def read(source: Images, index: int, transforms: Transforms, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return the first stage of one sample: uint8, c h w.

    Raises Unreadable, which names the sample, for anything that goes wrong, and where it has not the `shape` of the
    others.
    """
    try:
        image = source.load(index)
        with closing_file(image):
            pixels = transforms.fit(image)
    except Unreadable:
        raise
    except Exception as error:  # decoders raise whatever the bytes lead them to
        raise Unreadable(f"{source.describe(index)}: {told(error)}") from error
    if shape is not None and tuple(pixels.shape) != shape:
        got, others = (" x ".join(map(str, each)) for each in (pixels.shape, shape))
        raise Unreadable(f"{source.describe(index)}: {got}, expected {others} as its header said")
    return pixels


def closing_file(image: Any) -> AbstractContextManager[Any]:
    """Return a context that closes the file of a Pillow image that was opened from one."""
    return image if hasattr(image, "fp") else nullcontext()


def told(error: Exception) -> str:
    """Return what a decoder's error says, on one line."""
    message = (str(error).splitlines() or [""])[0].removesuffix(".")
    if type(error).__name__ == "UnidentifiedImageError":
        return "no image that Pillow knows"
    named = getattr(error, "strerror", None) or message  # without the path, which is told anyway
    return named if isinstance(error, (OSError, ValueError)) and named else f"{type(error).__name__}: {message}"


def in_threads(source: Images, function: Callable[[int], Made], indices: Sequence[int]) -> Iterator[Made]:
    """Yield `function`, which loads from `source`, of each of `indices`, in their order.

    An error, or Ctrl-C, drops what has not begun.
    """
    chunks = [indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK)]
    threads = min(len(chunks), (cpu_count() or 1) + 4)  # some more than cores, for those that wait for a disk
    if threads < 2 or getattr(source, "one_at_a_time", False):
        yield from map(function, indices)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        # No more than a few chunks ahead, so that memory does not depend on the number of samples.
        waiting = iter(chunks)
        ahead = [pool.submit(_each, function, chunk) for chunk in islice(waiting, 2 * threads)]
        while ahead:
            yield from ahead.pop(0).result()
            ahead += [pool.submit(_each, function, chunk) for chunk in islice(waiting, 1)]
    finally:
        pool.shutdown(cancel_futures=True)


def _each(function: Callable[[int], Made], indices: Sequence[int]) -> list[Made]:
    return [function(index) for index in indices]
