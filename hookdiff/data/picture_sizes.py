"""The sizes of the pictures that a run is trained on, and of those that it makes: height and width in pixels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hookdiff.data.batch import Batch
from hookdiff.data.memory_reader import is_paired
from hookdiff.errors import UserError, listed

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed

Size = tuple[int, int]  # height and width

_MOST_SIDE = 2**15
_NEAR = 3  # sizes in a message


def trained_sizes(feed: Feed) -> dict[Size, int]:
    """Return the number of training pictures of each size, the most frequent size first; {} without pictures c h w."""
    channels_and_sides = feed.picture_shape
    if len(channels_and_sides) != 3:
        return {}
    if feed.by_shape is None:
        _, height, width = channels_and_sides
        return {(height, width): len(feed.training)}
    factor = _factor(feed)
    return {(factor * height, factor * width): num for (_, height, width), num in feed.by_shape.counts.items()}


def picture_shapes(feed: Feed) -> list[tuple[int, ...]]:
    """Return the shapes of the pictures that the run makes, the most frequent shape first."""
    return [(feed.picture_shape[0], *size) for size in trained_sizes(feed)] or [feed.picture_shape]


def input_shape(feed: Feed, size: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an input of the network, for pictures of this `size`: see `Feed.input_shape`."""
    if len(feed.picture_shape) != 3:
        shown = " x ".join(map(str, feed.picture_shape))
        raise UserError(f"size: leave it out; this run makes samples of {shown}, which have no height and width")
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise UserError(f"size: expected height and width in pixels, such as (48, 80), got {size!r}")
    height, width = size
    if tuple(feed.picture_shape[1:]) == (height, width):
        return tuple(feed.shape)
    factor = _factor(feed)
    if height % factor or width % factor:
        near = [_around(side, factor) for side in (width, height)]
        texts = [f"{wide}x{high}" for wide, high in product(*near)]
        raise UserError(
            f"size {size_name(size)}: a latent has a pixel for each {factor}x{factor} pixels of a picture, so both "
            f"sides must be multiples of {factor}; nearest: {listed(texts, 4)}"
        )
    return feed.shape[0], height // factor, width // factor


def examples_for(feed: Feed, choose: Callable[[int], Sequence[int]], shape: Sequence[int]) -> Batch:
    """Return the training samples that `choose` picks, given their number: of this `shape`, or the most frequent one.

    Conditions that are images may have another size: see `fitted`.
    """
    return feed.examples(choose, shape if tuple(shape) in feed.shapes else None)


def fitted(feed: Feed, conditions: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, Tensor]:
    """Return `conditions` of samples of the most frequent shape for inputs of `shape` (c h w).

    Those that are images are resized to cover the new size, and cut at the centre, as training pictures are.
    """
    usual = feed.shapes[0]
    if tuple(shape) == tuple(usual):
        return dict(conditions)
    columns = dict(conditions)
    for name, column in conditions.items():
        for known in (usual, picture_shapes(feed)[0]):
            if is_paired(column.shape[1:], known):
                factor = known[-1] // usual[-1]
                columns[name] = _covered(column, (factor * shape[-2], factor * shape[-1]))
    return columns


def _covered(images: Tensor, size: Size) -> Tensor:
    """Return the centre of `images` (n ... h w), resized to cover a `size`, of the same dtype."""
    (high, wide), (height, width) = images.shape[-2:], size
    scale = max(height / high, width / wide)
    sides = max(height, round(scale * high)), max(width, round(scale * wide))
    how: dict[str, Any] = {"mode": "bilinear", "antialias": True} if images.is_floating_point() else {"mode": "nearest"}
    planes = functional.interpolate(images.reshape(-1, 1, high, wide).float(), sides, **how)
    top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
    planes = planes[..., top : top + height, left : left + width]
    return planes.reshape(*images.shape[:-2], height, width).to(images.dtype)


def labels_for(feed: Feed, size: Size | None) -> Tensor | None:
    """Return the labels of the training samples of this `size`; of all samples if the size was not trained.

    None: of all samples if they have one size, else of those of the most frequent size.
    """
    if feed.labels is None or feed.by_shape is None:
        return feed.labels
    shape = feed.input_shape(size)
    return feed.labels[feed.by_shape.of_shape(shape)] if shape in feed.shapes else feed.labels


def trained_near(feed: Feed, size: Size) -> list[Size]:
    """Return the trained sizes that are nearest to a `size` that was not trained; none for a trained size."""
    known = trained_sizes(feed)
    return [] if size in known else sorted(known, key=lambda other: _difference(size, other))[:_NEAR]


def untrained_text(feed: Feed, size: Size) -> str:
    """Return a text about a `size` that was not trained, with the nearest sizes that were; "" for a trained size."""
    if not (near := trained_near(feed, size)):
        return ""
    trained = f"nearest trained size{'s' if len(near) > 1 else ''}: {', '.join(map(size_name, near))}"
    return f"the network was not trained on pictures of {size_name(size)}; {trained}"


def size_of(text: str) -> Size:
    """Return height and width of a size such as "80x48" (width x height).

    Raises:
        ValueError: for any other text.
    """
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if not found or not all(2 <= int(side) <= _MOST_SIDE for side in found.groups()):
        side = text if text.isdecimal() else "80"
        raise ValueError(f"expected WIDTHxHEIGHT, such as {side}x{side}, got {text!r}")
    return int(found[2]), int(found[1])


def size_name(size: Sequence[int]) -> str:
    """Return a size as texts have it, such as "80x48" (width x height); `size` ends with height and width."""
    return f"{size[-1]}x{size[-2]}"


def _factor(feed: Feed) -> int:
    """Return the pixels of a picture, along each side, for a pixel of an input."""
    return max(1, feed.picture_shape[-1] // feed.shape[-1]) if feed.codec else 1


def _around(side: int, factor: int) -> list[int]:
    """Return the positive multiples of `factor` around `side`."""
    return sorted({max(factor, side // factor * factor), -(-side // factor) * factor})


def _difference(size: Size, other: Size) -> float:
    """Return how far two sizes are apart: the distance of the logarithms of their sides."""
    return math.dist([math.log(side) for side in size], [math.log(side) for side in other])
