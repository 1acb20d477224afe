"""Reads the header of every picture, so that pictures that do not fit together are refused before training."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from attrs import Factory, define

from hookdiff.data.decode import Unreadable, num_channels, upright_size
from hookdiff.data.labels import EXAMPLES, some
from hookdiff.data.source import Images, with_images
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")

_MANY = 20_000  # reading more headers than this takes seconds
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # the mode of arrays, by number of channels


@define
class Kind:
    """Pictures of one mode and size."""

    mode: str  # of Pillow
    width: int
    height: int
    count: int = 0
    example: str = ""


@define
class Survey:
    """The facts about the pictures of a source."""

    shape: tuple[int, ...] = ()  # of a sample after the first stage; empty until a sample is read
    kinds: list[Kind] = Factory(list)
    unreadable: dict[int, str] = Factory(dict)  # by sample, the reason why the header cannot be read
    undecodable: dict[int, str] = Factory(dict)  # by sample, the reason why the pixels cannot be decoded


def survey(source: Images, transforms: Transforms, skip: bool) -> Survey:
    """Read the header of every sample of `source`, or of none if the source has a `shape`.

    Raises UserError if `transforms` cannot give the pictures one shape, if no header can be read, or, unless `skip`, if
    any header cannot be read.
    """
    if shape := getattr(source, "shape", None):
        kinds = [kind_of_shape(shape, len(source), source.describe(0))]
        return Survey(first_stage_shape(kinds, transforms), kinds)
    if len(source) > _MANY:
        logger.info("data: reading the headers of %d images", len(source))
    found: dict[tuple[str, int, int], Kind] = {}
    unreadable = {}
    for index, kind in with_images(source, range(len(source)), _kind_of):
        if isinstance(kind, Unreadable):
            unreadable[index] = str(kind)
            continue
        kind = found.setdefault((kind.mode, kind.width, kind.height), kind)
        kind.count += 1
        kind.example = kind.example or source.describe(index)
    check_readable(unreadable.values(), len(source), skip)
    kinds = list(found.values())
    return Survey(first_stage_shape(kinds, transforms), kinds, unreadable)


def kind_of_shape(shape: Sequence[int], count: int = 0, example: str = "") -> Kind:
    """Return the `Kind` of `count` arrays of pixels of `shape`, c h w or h w."""
    channels, height, width = (1, *shape) if len(shape) == 2 else shape
    if channels not in _MODES:
        raise ValueError(f"{channels} channels, expected 1 to 4")
    return Kind(_MODES[channels], width, height, count, example)


def _kind_of(_: int, image: Any) -> Kind:
    return kind_of_shape(image.shape) if hasattr(image, "shape") else Kind(image.mode, *upright_size(image))


def check_readable(unreadable: Collection[str], total: int, skip: bool) -> None:
    """Raise UserError if all of the `total` samples are unreadable, or, unless `skip`, if any is."""
    if len(unreadable) == total:
        raise UserError(f"none of the {total} images can be read:{_lines(unreadable)}")
    if unreadable and not skip:
        way_out = "unreadable = 'skip' leaves them out"
        raise UserError(f"{len(unreadable)} of {total} images cannot be read ({way_out}):{_lines(unreadable)}")


def first_stage_shape(kinds: list[Kind], transforms: Transforms) -> tuple[int, int, int]:
    """Return the shape (c, h, w) that `transforms` give pictures of all these kinds.

    Raises UserError for grey among colour, for different sizes, and for sizes that are too small.
    """
    grey = [kind for kind in kinds if num_channels(kind.mode) == 1]
    colour = [kind for kind in kinds if kind not in grey]
    if grey and colour and not transforms.channels:
        counts = f"{_count(grey)} images are grey, {_count(colour)} are in colour"
        raise UserError(f"{counts}: set channels = 1 or 3{_examples([grey[0], colour[0]])}")
    channels = transforms.channels or (1 if grey else 3)
    if side := transforms.side:
        small = [kind for kind in kinds if min(kind.width, kind.height) < side]
        if small and not transforms.upscale:
            key = "resize" if transforms.resize else "image_size"
            counts = f"{_count(small)} of {_count(kinds)} images are smaller than {key} = {side}"
            raise UserError(f"{counts}; upscale = true enlarges them:{_examples(small)}")
        return channels, side, side
    sizes = Counter[str]()
    for kind in kinds:
        sizes[f"{kind.width} x {kind.height}"] += kind.count
    if len(sizes) > 1:
        counts = some([f"{count} of {size}" for size, count in sizes.most_common()])
        raise UserError(f"the images have {len(sizes)} sizes ({counts}): set image_size, the side to train on")
    return channels, kinds[0].height, kinds[0].width


def _count(kinds: Iterable[Kind]) -> int:
    return sum(kind.count for kind in kinds)


def _examples(kinds: Iterable[Kind]) -> str:
    return _lines([f"{kind.example} ({kind.width} x {kind.height})" for kind in kinds])


def _lines(items: Collection[str]) -> str:
    rest = len(items) - EXAMPLES
    return "".join(f"\n  {item}" for item in islice(items, EXAMPLES)) + (f"\n  and {rest} more" if rest > 0 else "")
