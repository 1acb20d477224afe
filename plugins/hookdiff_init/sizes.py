"""Decides whether the training images keep about the shapes of the pictures, by what squares would cut off."""

from collections import Counter

import torch
from attrs import define
from torch import Tensor

from hookdiff import listed
from hookdiff.images import Transforms, cut_off, size_name
from hookdiff_init.look import Pictures

_MOST = 0.2  # mean share of the pixels of a picture that squares may cut off
_RATIOS = (2.0, 4.0, 8.0, 16.0)  # of the long side by the short one, at most; the first is the usual one
_NAMED = 3  # sizes in a comment, and in a grid of samples


@define(frozen=True)
class Sizes:
    """The sizes of aspect-ratio buckets in which pictures are trained on."""

    counts: Counter[str]  # pictures by size
    step: int | None  # of the sides, in pixels; None: the usual one
    ratio: float | None  # of the long side by the short one, at most; None: the usual one
    cut_by_squares: float  # mean share of the pixels of a picture that squares would cut off
    cut: float  # the same share of these sizes
    small: int  # pictures that are smaller than their size

    @property
    def most(self) -> int:
        """The number of pictures of the most frequent size."""
        return max(self.counts.values())

    @property
    def drawn(self) -> list[str]:
        """The most frequent sizes, for grids of samples."""
        return [name for name, _ in self.counts.most_common(_NAMED)]

    @property
    def why(self) -> str:
        """What is cut off, in words."""
        squares, own = round(100 * self.cut_by_squares), round(100 * self.cut)
        names = listed([name for name, _ in self.counts.most_common()], _NAMED)
        return f"squares cut off {squares} % of the pixels, these sizes {own} %: {names}"


def sizes_for(pictures: Pictures, side: int, divisor: int, longest: int | None = None) -> Sizes | None:
    """Return sizes with about the pixels of a square of `side`; None if squares do, or are all that the network takes.

    divisor: of the sides that the network takes.
    longest: the longest side that it takes; None: any side.
    """
    known = torch.tensor([(height, width) for width, height in pictures.sizes])
    times = torch.tensor([*pictures.sizes.values()])

    def mean(shares: Tensor) -> float:
        return float((shares * times).sum() / times.sum())

    by_squares = mean(cut_off(known, torch.full_like(known, side)))
    if by_squares <= _MOST:
        return None
    step, best = _step(side, divisor), None
    for ratio in _RATIOS:
        sizes = Transforms(image_size=side, buckets=True, bucket_step=step, bucket_ratio=ratio).sized
        numbers, small = sizes.chosen(known)
        chosen = torch.tensor(sizes.sizes)[numbers]
        if longest is not None and int(chosen.max()) > longest:
            break
        if (cut := mean(cut_off(known, chosen))) >= (best.cut if best else by_squares):
            continue
        counts = Counter[str]()
        for size, count in zip(chosen.tolist(), times.tolist(), strict=True):
            counts[size_name(size)] += count
        best = Sizes(counts, step, ratio if ratio > _RATIOS[0] else None, by_squares, cut, int(times[small].sum()))
        if cut <= _MOST:
            break
    return best


def _step(side: int, divisor: int) -> int | None:
    """Return a step of the sides of buckets that the network takes; None if it takes the usual one."""
    usual = Transforms(image_size=side, buckets=True).sized.sizes
    if all(each % divisor == 0 for size in usual for each in size):
        return None
    steps = [step for step in range(divisor, side // 8 + 1, divisor) if side % step == 0]
    return max(steps, default=divisor)
