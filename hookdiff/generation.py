"""Makes many images with a Loop, as many at a time as fit in memory, and their features."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.disk import to_uint8
from hookdiff.errors import UserError
from hookdiff.features import Collected, Space, paced, shares
from hookdiff.loop import Loop
from hookdiff.ranks import gathered_or_raised
from hookdiff.sampling import SampleRequest

# In lower case: messages of allocators and libraries that do not raise torch.OutOfMemoryError.
_MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
_ON_CPU = 1 << 18  # values of the images that are made at a time: more take memory, and are no faster


@define(eq=False)
class Images:
    """Makes images in parts: as many at a time as the sampler's option says, and half whenever a part does not fit."""

    loop: Loop
    size: int = field(init=False)  # images at a time

    def __attrs_post_init__(self) -> None:
        limit: int = getattr(self.loop.sampler, "batch_size", 256)
        values = torch.Size(self.loop.feed.shape).numel()
        self.size = limit if self.loop.device.type != "cpu" else max(1, min(limit, _ON_CPU // values))

    def make(self, numbers: range, request: Callable[[range], SampleRequest]) -> Iterator[Tensor]:
        """Yield the images `numbers` in parts: n c h w, float32, on the CPU. `request` returns that of some numbers.

        Raises UserError if not even one image fits.
        """
        start = numbers.start
        while start < numbers.stop:
            part = range(start, min(numbers.stop, start + self.size))
            made = self._made(request(part))
            if made is not None:
                yield made
                start = part.stop
                continue
            self.size = len(part) // 2
            if not self.size:
                raise UserError(f"not even one image fits in the memory of {self.loop.device}")
            gc.collect()  # not in `_made`: there, the error and its frames still hold the tensors
            if self.loop.device.type in ("cuda", "mps"):
                getattr(torch, self.loop.device.type).empty_cache()

    def _made(self, request: SampleRequest) -> Tensor | None:
        """Return the images of `request`, or None if they do not fit in memory."""
        try:
            return self.loop.sample(request).images.cpu()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None


@define(eq=False)
class Generated:
    """Images of the current weights in a space. The number of an image determines its noise and its class.

    `weights` is "model" or the name of an average; None: an average if there is one. Raises UserError for others.
    """

    loop: Loop
    space: Space
    seed: int
    weights: str | None
    _images: Images = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._images = Images(self.loop)
        self.used()

    @property
    def at_a_time(self) -> int:
        """How many images all ranks together make at a time."""
        return self._images.size * self.loop.num_ranks

    def used(self) -> str:
        """Return the name of the weights that make the images now."""
        return self.loop.sample(SampleRequest(0, weights=self.weights)).weights

    def images(self, numbers: range) -> Iterator[Tensor]:
        """Yield the images `numbers` in parts, n c h w, float32. All ranks make them."""
        return self._images.make(numbers, self._request)

    def features(self, num: int, what: str) -> Collected:
        """Return the features of the first `num` images, rounded to 8 bits as when they are saved; ranks share them.

        `what` is for messages, such as "fid: images". Raises ValueError on all ranks for an image that is not finite.
        """
        share = range(*shares(num)[self.loop.rank])
        made = paced(self.images(share), len(share), what)
        return Collected.merged(
            gathered_or_raised(lambda: Collected.of(self.space, (_pixels(part, what) for part in made)))
        )

    def _request(self, numbers: range) -> SampleRequest:
        return SampleRequest(len(numbers), self.seed, numbers.start, stream="evaluate", weights=self.weights)


def _pixels(images: Tensor, what: str) -> Tensor:
    if bad := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
        raise ValueError(f"{what}: {bad} of {len(images)} generated images are not finite")
    return to_uint8(images)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a GPU or a CPU is out of memory."""
    known = isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)
    return known or isinstance(error, (MemoryError, torch.OutOfMemoryError))
