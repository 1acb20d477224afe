"""Makes the images of `hookdiff sample`: with their numbers, and size by size if they start from pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookdiff.data import Size, size_name
from hookdiff.terminal import paced

if TYPE_CHECKING:
    from hookdiff.experiment import Run

Numbered = tuple[Sequence[int], Tensor]  # the numbers of images, and the images: n c h w, float32


def numbered(parts: Iterable[Tensor]) -> Iterator[Numbered]:
    """Yield `parts` of images, n c h w, with their numbers from 0."""
    start = 0
    for part in parts:
        yield range(start, start + len(part)), part
        start += len(part)


def by_size(pictures: Sequence[Tensor], num: int) -> dict[Size, list[int]]:
    """Return the numbers of `num` images of each size if they start from `pictures` (c h w), in turn."""
    numbers: dict[Size, list[int]] = {}
    for number in range(num):
        _, height, width = pictures[number % len(pictures)].shape
        numbers.setdefault((height, width), []).append(number)
    return numbers


def images_from(
    run: Run,
    pictures: Sequence[Tensor],
    num: int,
    labels: Sequence[int] | None,
    prompts: Sequence[str] | None,
    **options: Any,
) -> Iterator[Numbered]:
    """Yield `num` images that start from `pictures` (c h w in [-1, 1]), in turn: the images of one size after another.

    `labels` has the class of each image; the `prompts` are used in turn. `options` are further arguments of
    `Run.batches`.
    """
    for size, numbers in by_size(pictures, num).items():
        same = torch.stack([picture for picture in pictures[:num] if picture.shape[1:] == size])
        parts = run.batches(
            len(numbers),
            size=size_name(size),
            numbers=numbers,
            labels=None if labels is None else [labels[number] for number in numbers],
            prompts=[prompts[number % len(prompts)] for number in numbers] if prompts else None,
            images=same,
            **options,
        )
        done = 0
        for part in paced(parts, len(numbers), f"images of {size_name(size)}"):
            yield numbers[done : done + len(part)], part
            done += len(part)
