"""Reads the header of every picture, so that pictures that do not fit together are refused before training."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

import numpy
import torch
from attrs import Factory, define, field
from torch import Tensor

from hookdiff.data.source import AnySource, Images
from hookdiff.errors import UserError
from hookdiff.images.decoding import Unreadable, num_channels, upright_size
from hookdiff.images.formats import missing_package
from hookdiff.images.labels import as_lines, some
from hookdiff.images.modes import load
from hookdiff.images.parallel_reading import with_images
from hookdiff.images.transforms import Transforms

logger = logging.getLogger("hookdiff")

PassedOver = dict[str, tuple[int, str]]  # by kind of file, the number and the first name

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

    @property
    def channels(self) -> int:
        """1 for grey pictures, 3 for others."""
        return num_channels(self.mode)


@define
class Survey:
    """The facts about the pictures of a source."""

    shape: tuple[int, ...] = ()  # of a resized sample; empty until a sample is read
    kinds: list[Kind] = Factory(list)
    unreadable: dict[int, str] = Factory(dict)  # by sample, the reason why the header cannot be read
    undecodable: dict[int, str] = Factory(dict)  # by sample, the reason why the pixels cannot be decoded
    # Height and width of each picture from its header (n 2, int64; zeros: not read). None: no header was read.
    sizes: Tensor | None = field(default=None, eq=False)


def survey(source: AnySource, transforms: Transforms, skip: bool) -> Survey:
    """Read the header of every sample of `source` that is not known from its `shape` or `known_kinds()`.

    Raises UserError that lists all problems: faults of the source, pictures to which `transforms` cannot give one
    shape, and pictures that cannot be read; with `skip`, these count only if no picture can be read.
    """
    if shape := source.shape:
        kinds = [kind_of_shape(shape, len(source), source.name_of(0))]
        refuse([*source.problems, *misfits(kinds, transforms)])
        return Survey(first_stage_shape(kinds, transforms), kinds)
    known, unknown = source.known_kinds()
    if len(unknown) > _MANY:
        logger.info("data: reading the headers of %s images", f"{len(unknown):,}")
    by_header = {(kind.mode, kind.width, kind.height): kind for kind in known}
    unreadable, sizes = {}, numpy.zeros((len(source), 2), numpy.int64)
    for index, kind in with_images(source, unknown, _kind_of, "data: headers"):
        if isinstance(kind, Unreadable):
            unreadable[index] = str(kind)
            continue
        kind = by_header.setdefault((kind.mode, kind.width, kind.height), kind)
        kind.count += 1
        kind.example = kind.example or source.name_of(index)
        sizes[index] = kind.height, kind.width
    kinds = list(by_header.values())
    problems = [*source.problems, *misfits(kinds, transforms)]
    if (problems or (unreadable and not skip)) and len(source) <= _MANY:  # then their pixels are quickly tried too
        readable = [index for index in range(len(source)) if index not in unreadable]
        broken = {i: str(error) for i, error in with_images(source, readable, _read_pixels) if error is not None}
        unreadable = dict(sorted((unreadable | broken).items()))
    refuse([*unreadable_problems(unreadable.values(), len(source), skip), *problems])
    return Survey(first_stage_shape(kinds, transforms), kinds, unreadable, sizes=torch.from_numpy(sizes))


def kind_of_shape(shape: Sequence[int], count: int = 0, example: str = "") -> Kind:
    """Return the `Kind` of `count` arrays of pixels of `shape`, c h w or h w."""
    channels, height, width = (1, *shape) if len(shape) == 2 else shape
    if channels not in _MODES:
        raise ValueError(f"{channels} channels, expected 1 to 4")
    return Kind(_MODES[channels], width, height, count, example)


def _kind_of(image: Any) -> Kind:
    return kind_of_shape(image.shape) if hasattr(image, "shape") else Kind(image.mode, *upright_size(image))


def _read_pixels(image: Any) -> None:
    if hasattr(image, "convert"):  # an image of Pillow whose pixels are not read yet
        load(image)


def refuse(problems: Sequence[str]) -> None:
    """Raise UserError that lists all problems, if there are any."""
    if len(problems) > 1:
        raise UserError("\n".join([f"{len(problems)} problems", *(indent(problem, "  ") for problem in problems)]))
    for problem in problems:
        raise UserError(problem)


def unreadable_problems(unreadable: Collection[str], total: int, skip: bool) -> list[str]:
    """Return a problem if all `total` samples are unreadable, or if any is and `skip` is false."""
    if len(unreadable) == total:
        return [f"none of the {total:,} images can be read:{as_lines(unreadable)}"]
    if unreadable and not skip:
        way_out = "unreadable = 'skip' leaves them out"
        return [f"{len(unreadable):,} of {total:,} images cannot be read ({way_out}):{as_lines(unreadable)}"]
    return []


def left_out_text(unreadable: Sequence[str], total: int) -> list[str]:
    """Return the number of unreadable samples and the first one, in words; nothing if there are none."""
    counts = f"{len(unreadable):,} of {total:,} images cannot be read and are left out"
    return [f"{counts}; the first is {unreadable[0]}"] if unreadable else []


def passed_over_text(source: AnySource | Images) -> list[str]:
    """Return the number of other files beside the pictures of a source, in words; nothing if there are none."""
    if not (kinds := AnySource.of(source).passed_over):
        return []
    count = sum(count for count, _ in kinds.values())
    return [f"{count:,} other {'files are' if count > 1 else 'file is'} not used: {some(texts_of_kinds(kinds))}"]


def texts_of_kinds(passed_over: Mapping[str, tuple[int, str]]) -> list[str]:
    """Return the number of files of each kind that is not read, with the first name.

    Kinds that a package would read come first, then the most frequent ones.
    """
    texts = []
    for kind, (count, first) in passed_over.items():
        package = missing_package(kind)
        way_out = f"; to read {'them' if count > 1 else 'it'}: pip install {package}" if package else ""
        texts.append((not package, -count, kind, f"{count:,} {kind} ({first}{way_out})"))
    return [text for *_, text in sorted(texts)]


def first_stage_shape(kinds: list[Kind], transforms: Transforms) -> tuple[int, int, int]:
    """Return the shape (c, h, w) that `transforms` give pictures of all these kinds.

    Raises UserError for a mix of grey and colour, for different sizes, and for sizes that are too small.
    """
    refuse(misfits(kinds, transforms))
    channels = transforms.channels or kinds[0].channels
    if side := transforms.side:
        return channels, side, side
    return channels, kinds[0].height, kinds[0].width


def misfits(kinds: list[Kind], transforms: Transforms) -> list[str]:
    """Return the reasons why `transforms` cannot give pictures of all these kinds the shapes of samples."""
    problems = []
    grey = [kind for kind in kinds if kind.channels == 1]
    colour = [kind for kind in kinds if kind not in grey]
    if grey and colour and not transforms.channels:
        counts = f"{_count(grey)} images are grey, {_count(colour)} are in colour"
        problems.append(f"{counts}: set channels = 1 or 3{_examples([grey[0], colour[0]])}")
    if transforms.has_sizes:
        return problems  # see images/sized.py
    if side := transforms.side:
        small = [kind for kind in kinds if min(kind.width, kind.height) < side]
        if small and not transforms.upscale:
            key = "resize" if transforms.resize else "image_size"
            counts = f"{_count(small)} of {_count(kinds)} images are smaller than {key} = {side}"
            problems.append(f"{counts}; upscale = true enlarges them:{_examples(small)}")
        return problems
    sizes = Counter[str]()
    for kind in kinds:
        sizes[f"{kind.width} x {kind.height}"] += kind.count
    if len(sizes) > 1:
        counts = some([f"{count:,} of {size}" for size, count in sizes.most_common()])
        problems.append(f"the images have {len(sizes):,} sizes ({counts}): set image_size, the side to train on")
    return problems


def _count(kinds: Iterable[Kind]) -> int:
    return sum(kind.count for kind in kinds)


def _examples(kinds: Iterable[Kind]) -> str:
    return as_lines([f"{kind.example} ({kind.width} x {kind.height})" for kind in kinds])
