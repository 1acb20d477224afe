"""The sizes of aspect-ratio buckets, and the size that each picture gets.

A picture goes to the size nearest in the logarithm of width by height. It is resized to cover that size and cut at the
centre, so it is never stretched. Sizes are height and width in pixels; texts have the width first, such as "80x48".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import lru_cache

import torch
from attrs import define
from torch import Tensor

from hookdiff.data.picture_sizes import Size as Size, size_name as size_name, size_of as size_of


def default_step(side: int) -> int:
    """Return the largest divisor of `side` up to an eighth of it and 64."""
    return max(step for step in range(1, max(1, min(side // 8, 64)) + 1) if side % step == 0)


def sizes_of_side(side: int, step: int, ratio: float) -> list[Size]:
    """Return the sizes with about side x side pixels and sides that are multiples of `step`.

    For the width w = side, side + step, ... the height is the multiple of the step nearest to side^2 / w, as long as
    w / h is at most `ratio`. Each size is there in both directions.
    """
    sizes, width = list[Size](), side
    while height := math.floor(side * side / width / step + 0.5) * step:
        if width / height > ratio:
            break
        sizes += [(height, width), (width, height)]
        width += step
    return sorted(dict.fromkeys(sizes))


_APART = 1.5  # the area of a square by that of the next smaller one, if their sides are given


@define(frozen=True)
class Buckets:
    """The sizes of a run, in groups of about the same number of pixels: those of the largest side come first."""

    groups: tuple[tuple[Size, ...], ...]

    @classmethod
    @lru_cache
    def of(cls, sides: tuple[int, ...], buckets: bool | tuple[str, ...], step: int | None, ratio: float) -> Buckets:
        """Return the sizes that these keys of [data] describe; `sides` are those of `image_size`.

        Raises:
            ValueError: for two sizes of one shape among which a picture could not choose.
        """
        descending = sorted({*sides}, reverse=True)
        if isinstance(buckets, bool):
            squares = {side: [(side, side)] for side in descending}
            made = {side: sizes_of_side(side, step or default_step(side), ratio) for side in descending}
            return cls(tuple(map(tuple, (made if buckets else squares).values())))
        given = [*dict.fromkeys(map(size_of, buckets))]
        own = [min(descending, key=lambda side: abs(math.log(h * w / side**2))) for h, w in given]
        groups = [tuple(size for size, of in zip(given, own, strict=True) if of == side) for side in descending]
        for group in groups:
            by_ratio: dict[float, Size] = {}
            for size in group:
                if (other := by_ratio.setdefault(size[1] / size[0], size)) != size:
                    texts = f"{size_name(other)} and {size_name(size)}"
                    raise ValueError(f"{texts} have the same shape: image_size needs the sides of both")
        return cls(tuple(group for group in groups if group))

    @classmethod
    def of_sizes(cls, sizes: Iterable[Size]) -> Buckets:
        """Return groups of `sizes` whose sides are not known: a group has each shape once, and about one area."""
        groups: list[list[Size]] = []
        for height, width in sorted(sizes, key=math.prod, reverse=True):
            fits = (
                group
                for group in groups
                if _APART * height * width > math.prod(group[0]) and all(h * width != w * height for h, w in group)
            )
            if (group := next(fits, None)) is None:
                groups.append(group := [])
            group.append((height, width))
        return cls(tuple(map(tuple, groups)))

    def among(self, sizes: Collection[Size]) -> Buckets:
        """Return the groups without the sizes that are not in `sizes`."""
        groups = (tuple(size for size in group if size in sizes) for group in self.groups)
        return Buckets(tuple(group for group in groups if group))

    @property
    def sizes(self) -> list[Size]:
        """All sizes."""
        return sorted({size for group in self.groups for size in group})

    def nearest(self, height: int, width: int) -> Size:
        """Return the size that a picture of this height and width (pixels) gets: see `chosen`."""
        (number,), _ = self.chosen(torch.tensor([[height, width]]))
        return self.sizes[int(number)]

    def chosen(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number in `self.sizes` of the size for each picture, and whether it must be enlarged (n, bool).

        `sizes` are height and width of the pictures (n 2, int64, above 0). A picture gets a size of the first group of
        which it fills the nearest size; if it fills none, that of the last group.
        """
        codes, places = torch.unique(sizes[:, 0] * 2**32 + sizes[:, 1], return_inverse=True)
        heights, widths = codes // 2**32, codes % 2**32
        ratios = (widths.double() / heights.double()).log()
        known = self.sizes
        chosen, is_small = torch.zeros_like(codes), torch.ones(len(codes), dtype=torch.bool)
        for group in self.groups:
            own = torch.tensor(group)
            near = (ratios[:, None] - (own[:, 1].double() / own[:, 0].double()).log()).abs().argmin(1)
            fits = (heights >= own[near, 0]) & (widths >= own[near, 1])
            numbers = torch.tensor([known.index(size) for size in group])[near]
            chosen = numbers.where(is_small, chosen)
            is_small &= ~fits
        return chosen[places], is_small[places]


def cut_off(sizes: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the pixels of each picture (n 2: height, width) that a cut to its target (n 2) loses."""
    sizes, targets = sizes.double(), targets.double()
    scale = (targets / sizes).amax(1)
    return 1 - targets.prod(1) / (sizes.prod(1) * scale * scale)
