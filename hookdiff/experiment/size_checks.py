"""The check that a network takes each size of the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hookdiff.data.feed import Feed
from hookdiff.data.picture_sizes import size_name
from hookdiff.images.transforms import size_text

_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)


def check_sizes(name: str, feed: Feed, attempt: Callable[[Sequence[int]], None]) -> None:
    """Raise ValueError unless the network called `name` takes samples of each size of `feed`.

    `attempt` calls the network for a shape, c h w, and raises ValueError if the network refuses it. The message has the
    multiple that fits.
    """
    order = feed.by_shape
    used = sorted({*order.numbers[feed.usable].tolist()}) if order else []  # also those of held-out samples
    for shape in dict.fromkeys((*feed.shapes, *(tuple(feed.reader.shapes[number]) for number in used))):
        try:
            attempt(shape)
        except ValueError as error:
            raise ValueError(f"{name} {error}; {_way_out(feed, shape, attempt)}") from error


def _way_out(feed: Feed, shape: Sequence[int], attempt: Callable[[Sequence[int]], None]) -> str:
    scale = feed.picture_shape[-1] // feed.shape[-1]  # of pictures, if samples are latents
    for multiple in _MULTIPLES:
        if not _takes(attempt, (shape[0], *_odd_multiples(shape[1], shape[2], multiple))):
            continue
        step = multiple * scale
        side = feed.picture_shape[-1]
        if side % step:
            return f"set data.image_size to a multiple of {step}; nearest: {max(1, round(side / step)) * step}"
        high, wide = (max(1, round(of / multiple)) * step for of in shape[1:])
        near = size_name((high, wide))
        return f"set data.bucket_step = {step}, or a multiple of it; in a list of data.buckets, the nearest is {near}"
    channels, square, longest = shape[0], feed.shape[-1], max(shape[1:])
    inside = [(channels, square - multiple, square) for multiple in _MULTIPLES if multiple < square]
    if square < longest and any(_takes(attempt, each) for each in inside):
        return f"sides of {longest * scale} are too long for it: set a smaller data.image_size or data.bucket_ratio"
    squares = (channels, *[math.isqrt(math.prod(shape[1:]))] * 2)
    if shape[1] != shape[2] and any(_takes(attempt, each) for each in (squares, feed.shape)):
        return "it takes squares alone: leave out data.buckets, or train another network, such as dit"
    return f"it takes no size near {size_text(shape)}"


def _odd_multiples(height: int, width: int, multiple: int) -> tuple[int, int]:
    """Return near sides that fit only a network that takes all multiples of `multiple`, and no square for an oblong."""
    high, wide = (2 * round((side / multiple - 1) / 2) + 1 for side in (height, width))
    if high == wide and height != width:
        high, wide = (high + 2, wide) if height > width else (high, wide + 2)
    return high * multiple, wide * multiple


def _takes(attempt: Callable[[Sequence[int]], None], shape: Sequence[int]) -> bool:
    try:
        attempt(shape)
    except ValueError:
        return False
    return True
