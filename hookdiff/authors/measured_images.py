"""The images of metrics, in batches of one size, and their features in the order of the images."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.authors.image_maker import ImageMaker
from hookdiff.data.picture_sizes import Size, trained_sizes
from hookdiff.features.collected import Collected, check_dim
from hookdiff.features.space import Embedding
from hookdiff.loop.loop import Loop
from hookdiff.machine.dtensor import is_sharded
from hookdiff.models.sample_request import SampleRequest

_BLOCK = 4096  # images of several sizes that are sorted by size before they are made


@define(eq=False, slots=False)
class MeasuredImages:
    """The images of metrics. The number of an image sets its noise, its class and its size.

    If the training pictures have several sizes, an image has the size of a random training picture, so each size is as
    frequent as in the data. Default of the `labels`: see `SampleRequest.default_labels`.
    """

    loop: Loop
    seed: int = 0
    weights: str | None = None  # "model" or the name of an average; None: an average if there is one
    # Returns the labels of a request for images of a size.
    labels: Callable[[SampleRequest, Size | None], tuple[int, ...]] | None = None
    _makers: dict[Size | None, ImageMaker] = field(factory=dict, init=False)

    @cached_property
    def _sizes(self) -> dict[Size, int]:
        """The sizes among which images choose, and their numbers of training pictures."""
        known = trained_sizes(self.loop.feed)
        return known if len(known) > 1 else {}

    @property
    def at_a_time(self) -> int:
        """The number of images in a batch, of the most frequent size."""
        return self._maker(next(iter(self._sizes), None)).at_a_time

    def parts(self, numbers: range) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the images with these `numbers` in batches of one size: their numbers, and n c h w, float32, CPU.

        Images of several sizes come in blocks of 4,096 numbers, and in each block size by size.
        """
        for size, group in self._groups(numbers):
            done = 0
            for images in self._maker(size).make(range(len(group)), partial(self._request, size, group)):
                yield group[done : done + len(images)], images
                done += len(images)

    def missing(self, numbers: Sequence[range], rank: int) -> int:
        """Return how many batches `rank` makes less than the rank with the most, if they make images `numbers`.

        The ranks of a sharded model must call it equally often. 0 for another model.
        """
        if not any(map(is_sharded, self.loop.model.parameters())):
            return 0
        counts = [
            sum(-(-len(group) // self._maker(size).at_a_time) for size, group in self._groups(own)) for own in numbers
        ]
        return max(counts) - counts[rank]

    def _groups(self, numbers: range) -> Iterator[tuple[Size | None, Sequence[int]]]:
        """Yield the sizes, and the numbers of the images of each size."""
        if not self._sizes:
            yield None, numbers
            return
        for first in range(numbers.start, numbers.stop, _BLOCK):
            groups: dict[Size, list[int]] = {size: [] for size in self._sizes}
            block = range(first, min(first + _BLOCK, numbers.stop))
            for number, size in zip(block, self.sizes(block), strict=True):
                groups[size].append(number)
            yield from ((size, group) for size, group in groups.items() if group)

    def sizes(self, numbers: Sequence[int]) -> list[Size]:
        """Return the sizes of the images with these `numbers`, if the training pictures have several sizes."""
        known, ends = list(self._sizes), list(accumulate(self._sizes.values()))
        request = SampleRequest(len(numbers), self.seed, stream="evaluate", numbers=tuple(numbers))
        # Other random numbers than those that choose the class of an image.
        return [known[bisect_right(ends, row)] for row in request.rows(ends[-1], part=2)]

    def _maker(self, size: Size | None) -> ImageMaker:
        if size not in self._makers:
            self._makers[size] = ImageMaker(self.loop, size)
        return self._makers[size]

    def _request(self, size: Size | None, group: Sequence[int], part: range) -> SampleRequest:
        numbers = tuple(group[part.start : part.stop])
        request = SampleRequest(len(part), self.seed, stream="evaluate", weights=self.weights, numbers=numbers)
        return evolve(request, labels=self.labels(request, size)) if self.labels else request


@define(eq=False)
class InOrder:
    """Adds the features of images to `collected` in the order of their numbers, from `start`.

    They come in any order, but soon all numbers below the largest one must have come.
    """

    collected: Collected
    start: int = 0
    _waiting: list[tuple[Sequence[int], Embedding]] = field(factory=list, init=False)

    def add(self, numbers: Sequence[int], features: Tensor, logits: Tensor | None = None) -> None:
        """Add the features (n d) and logits (n k) of the images with these numbers."""
        known = self._waiting[0][1][0].shape[1] if self._waiting else self.collected.moments.dim
        check_dim(features.shape[1], known)
        self._waiting.append((numbers, (features, logits)))
        num = sum(len(own) for own, _ in self._waiting)
        if max((max(own) for own, _ in self._waiting if len(own)), default=self.start) >= self.start + num:
            return
        order = torch.tensor([number for own, _ in self._waiting for number in own]).argsort()
        rows = torch.cat([rows for _, (rows, _) in self._waiting])[order]
        classes = [classes for _, (_, classes) in self._waiting if classes is not None]
        self.collected.add(rows, torch.cat(classes)[order] if classes else None)
        self.start, self._waiting = self.start + num, []
