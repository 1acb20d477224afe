"""Makes many images with a Loop: as many at a time as fit in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.errors import UserError
from hookdiff.loop import Loop
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a GPU or a CPU is out of memory."""
    known = isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)
    return known or isinstance(error, (MemoryError, torch.OutOfMemoryError))
