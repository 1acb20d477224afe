"""A look at the header of every picture before training, so that what cannot be used is told then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy
from attrs import Factory, define
from torch import Tensor

from hookdiff.data.decode import num_channels, upright_size
from hookdiff.data.source import Images, closing_file, in_threads, told
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError

_EXAMPLES = 5
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # of pixels that are no file

Kind = tuple[str, int, int]  # Pillow's mode, width, height


@define
class Survey:
    """Which kinds of pictures there are, and which samples cannot be read."""

    kinds: Counter[Kind] = Factory(Counter)
    examples: dict[Kind, int] = Factory(dict)  # the first sample of each
    unreadable: dict[int, str] = Factory(dict)  # why, by sample

    def add(self, index: int, kind: Kind) -> None:
        """Count one more of `kind`."""
        self.kinds[kind] += 1
        self.examples.setdefault(kind, index)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        kinds = [[*kind, count, self.examples[kind]] for kind, count in self.kinds.items()]
        return {"kinds": kinds, "unreadable": list(self.unreadable.items())}

    @classmethod
    def from_json(cls, saved: Any) -> Survey:
        """Return what `to_json` told of."""
        kinds = {(mode, width, height): (count, example) for mode, width, height, count, example in saved["kinds"]}
        counts = Counter({kind: count for kind, (count, _) in kinds.items()})
        return cls(counts, {kind: example for kind, (_, example) in kinds.items()}, dict(saved["unreadable"]))


def survey(source: Images) -> Survey:
    """Look at every sample of `source`; where its `shape` says what all are like, at none."""
    found = Survey()
    if shape := getattr(source, "shape", None):
        found.kinds[kind_of(numpy.empty(shape, numpy.uint8))] = len(source)
        found.examples[kind_of(numpy.empty(shape, numpy.uint8))] = 0
        return found

    def look(index: int) -> Kind | str:
        try:
            image = source.load(index)
            with closing_file(image):
                return kind_of(image)
        except Exception as error:  # decoders raise whatever the bytes lead them to
            return f"{source.describe(index)}: {told(error)}"

    for index, answer in enumerate(in_threads(source, look, range(len(source)))):
        if isinstance(answer, str):
            found.unreadable[index] = answer
        else:
            found.add(index, answer)
    return found


def kind_of(image: Any) -> Kind:
    """Return mode, width and height of a Pillow image, or of pixels c h w or h w."""
    if not isinstance(image, (Tensor, numpy.ndarray)):
        return (image.mode, *upright_size(image))
    channels, height, width = (1, *image.shape) if image.ndim == 2 else image.shape
    if channels not in _MODES:
        raise ValueError(f"{channels} channels, expected 1 to 4")
    return _MODES[channels], int(width), int(height)


def check_readable(unreadable: Iterable[str], total: int, skip: bool) -> None:
    """Raise UserError where some samples are `unreadable` and that is no reason to `skip` them, or all are."""
    found = list(unreadable)
    if len(found) == total:
        raise UserError(f"none of the {total} images can be read:{_list(found)}")
    if found and not skip:
        raise UserError(
            f"{len(found)} of {total} images cannot be read (unreadable = 'skip' leaves them out):{_list(found)}"
        )


def first_stage_shape(found: Survey, transforms: Transforms, describe: Callable[[int], str]) -> tuple[int, int, int]:
    """Return the shape (c, h, w) that `transforms` give all of what was found.

    Raises UserError where they cannot: grey among colour, different sizes, too small ones.
    """

    def example(kind: Kind) -> str:
        return f"{describe(found.examples[kind])} ({kind[1]} x {kind[2]})"

    total, side = sum(found.kinds.values()), transforms.side
    channels = Counter[int]()
    for kind, count in found.kinds.items():
        channels[num_channels(kind[0])] += count
    if len(channels) > 1 and transforms.channels is None:
        examples = [next(example(kind) for kind in found.kinds if num_channels(kind[0]) == each) for each in (1, 3)]
        raise UserError(
            f"{channels[1]} images are grey, {channels[3]} are in colour: say channels = 1 or 3{_list(examples)}"
        )
    depth: int = transforms.channels or min(channels)
    if side is not None:
        small = [kind for kind in found.kinds if min(kind[1:]) < side]
        if small and not transforms.upscale:
            count = sum(found.kinds[kind] for kind in small)
            key = "resize" if transforms.resize else "image_size"
            raise UserError(
                f"{count} of {total} images are smaller than {key} = {side}; upscale = true enlarges them:"
                + _list([example(kind) for kind in small])
            )
        return depth, side, side
    sizes = Counter[tuple[int, int]]()
    for (_, width, height), count in found.kinds.items():
        sizes[width, height] += count
    if len(sizes) > 1:
        told = [f"{count} of {width} x {height}" for (width, height), count in sizes.most_common(_EXAMPLES)]
        rest = ", ..." if len(sizes) > _EXAMPLES else ""
        raise UserError(
            f"the images have {len(sizes)} sizes ({', '.join(told)}{rest}): say image_size, the side to train on"
        )
    ((width, height),) = sizes
    return depth, height, width


def _list(lines: list[str]) -> str:
    rest = len(lines) - _EXAMPLES
    return "".join(f"\n  {line}" for line in lines[:_EXAMPLES]) + (f"\n  and {rest} more" if rest > 0 else "")
