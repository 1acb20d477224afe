"""The check that a network takes each size of the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hookdiff.data.feed import Feed
from hookdiff.images.transforms import size_text

_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)


def check_sizes(name: str, feed: Feed, attempt: Callable[[Sequence[int]], None]) -> None:
    """Raise ValueError unless the network called `name` takes samples of each size of `feed`.

    `attempt` calls the network for a shape, c h w, and raises ValueError if the network refuses it. The message has the
    multiple that fits.
    """
    for shape in feed.shapes:
        try:
            attempt(shape)
        except ValueError as error:
            raise ValueError(f"{name} {error}; {_way_out(feed, shape, attempt)}") from error


def _way_out(feed: Feed, shape: Sequence[int], attempt: Callable[[Sequence[int]], None]) -> str:
    scale = feed.picture_shape[-1] // feed.shape[-1]  # of pictures, if samples are latents
    for multiple in _MULTIPLES:
        near = (shape[0], *(max(1, round(side / multiple)) * multiple for side in shape[1:]))
        is_oblong = near[1] != near[2] or shape[1] == shape[2]  # a network may take squares alone
        if near[1:] == tuple(shape[1:]) or not is_oblong or not _takes(attempt, near):
            continue
        step = multiple * scale
        side = feed.picture_shape[-1]
        if side % step:
            return f"set data.image_size to a multiple of {step}; nearest: {max(1, round(side / step)) * step}"
        return f"set data.bucket_step = {step}, or a multiple of it"
    squares = (shape[0], *[math.isqrt(math.prod(shape[1:]))] * 2)
    if shape[1] != shape[2] and any(_takes(attempt, each) for each in (squares, feed.shape)):
        return "it takes squares alone: leave out data.buckets, or train another network, such as dit"
    return f"it takes no size near {size_text(shape)}"


def _takes(attempt: Callable[[Sequence[int]], None], shape: Sequence[int]) -> bool:
    try:
        attempt(shape)
    except ValueError:
        return False
    return True
