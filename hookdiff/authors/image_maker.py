"""Samples many images with a Loop, in batches that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.picture_sizes import Size, picture_shapes, size_name, trained_near
from hookdiff.errors import UserError
from hookdiff.loop.loop import Loop
from hookdiff.machine.dtensor import is_sharded
from hookdiff.machine.fitting import Fitting, is_out_of_memory
from hookdiff.models.sample_request import SampleRequest
from hookdiff.models.sampler import Sampler

# Limits of a batch on a CPU: a larger batch takes more memory, and no less time. See benchmarks/README.md.
_VALUES_ON_CPU = 1 << 16
_FEWEST_ON_CPU = 16


@define(eq=False)
class ImageMaker:
    """Samples images in batches of the sampler's `batch_size`; a batch that does not fit in memory is halved.

    All images have the `size`: height and width in pixels. Default: the most frequent size of the data.

    Raises:
        UserError: for a size that has no latents, and for samples without height and width.
    """

    loop: Loop
    size: Size | None = None
    _near: list[Size] = field(init=False)  # trained sizes that are nearest to another size; empty for a trained size
    _fitting: Fitting = field(init=False)

    def __attrs_post_init__(self) -> None:
        feed = self.loop.feed
        feed.input_shape(self.size)
        self._near = trained_near(feed, self.size) if self.size else []
        limit = self.loop.sampler.batch_size if self.loop.sampler else Sampler.batch_size
        values = torch.Size((feed.picture_shape[0], *self.size) if self.size else picture_shapes(feed)[0]).numel()
        num = limit if self.loop.device.type != "cpu" else min(limit, max(_FEWEST_ON_CPU, _VALUES_ON_CPU // values))
        self._fitting = Fitting(num, self.loop.device, any(map(is_sharded, self.loop.model.parameters())))

    @property
    def at_a_time(self) -> int:
        """The number of images in a batch."""
        return self._fitting.size

    def make(self, numbers: range, request: Callable[[range], SampleRequest]) -> Iterator[Tensor]:
        """Yield the images with these `numbers` in batches: n c h w, float32, on the CPU. `request` asks for a batch.

        Raises:
            UserError: if not even one image fits, if a batch does not fit and the model is sharded, or if the network
                fails at a size that was not trained.
        """
        return self._fitting.parts(numbers, lambda part: self._made(evolve(request(part), size=self.size)))

    def _made(self, request: SampleRequest) -> Tensor:
        try:
            return self.loop.sample(request).images.cpu()
        except Exception as error:  # a network may refuse a size by any error
            if not self._near or isinstance(error, UserError) or is_out_of_memory(error) or self._is_taken():
                raise
            assert self.size is not None
            feed, near = self.loop.feed, ", ".join(map(size_name, self._near))
            latents = f" (latents of {size_name(feed.input_shape(self.size))})" if feed.codec else ""
            refused = f"size {size_name(self.size)}{latents}: the network makes no pictures of this size: {error}"
            raise UserError(f"{refused}; nearest trained sizes: {near}") from error

    def _is_taken(self) -> bool:
        """Return whether the network makes a picture of the size, so that something else in a request is wrong."""
        try:
            self.loop.sample(SampleRequest(1, size=self.size))
        except Exception:  # nothing is lost: `_made` raises the first error, as the cause of its message
            return False
        return True
