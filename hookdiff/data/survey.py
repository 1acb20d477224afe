"""A look at the header of every picture before training, so that problems are reported before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
from attrs import Factory, define
from torch import Tensor

from hookdiff.data.decode import Unreadable, num_channels, upright_size
from hookdiff.data.source import Images, with_images
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError

_EXAMPLES = 5
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # of pixels that come without a mode


@define
class Kind:
    """Pictures of one mode and size."""

    mode: str  # of Pillow
    width: int
    height: int
    count: int = 0
    example: int = 0  # the first sample of this kind

    @property
    def size(self) -> str:
        """The width and the height for a message."""
        return f"{self.width} x {self.height}"


@define
class Survey:
    """The kinds of pictures of a source, and the samples that cannot be read."""

    kinds: list[Kind] = Factory(list)
    unreadable: dict[int, str] = Factory(dict)  # by sample, the reason why its header cannot be read
    undecodable: dict[int, str] = Factory(dict)  # the same of pixels; empty where none have been decoded


def survey(source: Images) -> Survey:
    """Read the header of every sample of `source`, or of none where the source has a `shape`."""
    if shape := getattr(source, "shape", None):
        return Survey([kind_of_shape(shape, len(source))])
    kinds: dict[tuple[str, int, int], Kind] = {}
    unreadable = {}
    for index, found in with_images(source, range(len(source)), lambda _, image: _kind_of(image)):
        if isinstance(found, Unreadable):
            unreadable[index] = str(found)
        else:
            found.example = index
            kinds.setdefault((found.mode, found.width, found.height), found).count += 1
    return Survey(list(kinds.values()), unreadable)


def kind_of_shape(shape: Sequence[int], count: int = 0) -> Kind:
    """Return the kind of `count` pictures that are pixels of `shape`, c h w or h w."""
    channels, height, width = (1, *shape) if len(shape) == 2 else shape
    if channels not in _MODES:
        raise ValueError(f"{channels} channels, expected 1 to 4")
    return Kind(_MODES[channels], width, height, count)


def _kind_of(image: Any) -> Kind:
    if isinstance(image, (Tensor, numpy.ndarray)):
        return kind_of_shape(image.shape)
    return Kind(image.mode, *upright_size(image))


def check_readable(unreadable: Iterable[str], total: int, skip: bool) -> None:
    """Raise UserError if all of the `total` samples are unreadable, or some are and they are not to be skipped."""
    lines = list(unreadable)
    if len(lines) == total:
        raise UserError(f"none of the {total} images can be read:{_some_lines(lines)}")
    if lines and not skip:
        raise UserError(
            f"{len(lines)} of {total} images cannot be read (unreadable = 'skip' leaves them out):{_some_lines(lines)}"
        )


def first_stage_shape(
    kinds: list[Kind], transforms: Transforms, describe: Callable[[int], str]
) -> tuple[int, int, int]:
    """Return the shape (c, h, w) that `transforms` give pictures of all these kinds.

    Raises UserError for grey among colour, for different sizes, and for sizes that are too small.
    """

    def lines(kinds: Iterable[Kind]) -> str:
        return _some_lines([f"{describe(kind.example)} ({kind.size})" for kind in kinds])

    by_channels: dict[int, list[Kind]] = {1: [], 3: []}
    sizes = Counter[str]()
    for kind in kinds:
        by_channels[num_channels(kind.mode)].append(kind)
        sizes[kind.size] += kind.count
    grey, colour = by_channels.values()
    if grey and colour and transforms.channels is None:
        num_grey, num_colour = (sum(kind.count for kind in group) for group in (grey, colour))
        raise UserError(
            f"{num_grey} images are grey, {num_colour} are in colour: set channels = 1 or 3"
            f"{lines((grey[0], colour[0]))}"
        )
    channels = transforms.channels or (1 if grey else 3)
    if side := transforms.side:
        small = [kind for kind in kinds if min(kind.width, kind.height) < side]
        if small and not transforms.upscale:
            key = "resize" if transforms.resize else "image_size"
            raise UserError(
                f"{sum(kind.count for kind in small)} of {sizes.total()} images are smaller than {key} = {side}; "
                f"upscale = true enlarges them:{lines(small)}"
            )
        return channels, side, side
    if len(sizes) > 1:
        examples = [f"{count} of {size}" for size, count in sizes.most_common(_EXAMPLES)]
        rest = ", ..." if len(sizes) > _EXAMPLES else ""
        raise UserError(
            f"the images have {len(sizes)} sizes ({', '.join(examples)}{rest}): set image_size, the side to train on"
        )
    return channels, kinds[0].height, kinds[0].width


def _some_lines(lines: list[str]) -> str:
    rest = len(lines) - _EXAMPLES
    return "".join(f"\n  {line}" for line in lines[:_EXAMPLES]) + (f"\n  and {rest} more" if rest > 0 else "")
