"""The plugin `samples`."""

import logging

import torch
from attrs import define, field
from attrs.validators import ge, le, optional

from hookdiff import Every, Loop, Periodic, SampleRequest, hookimpl, parse_every
from hookdiff.disk import save_grid
from hookdiff.options import about

log = logging.getLogger("hookdiff")


@define(eq=False)
class SampleGrid(Periodic):
    """Generates images from the same noise at regular intervals, so that one can see the model learn.

    A grid of them is saved as `samples/step-00001000.png` in the run directory, if there is one, and sent to the sinks.
    When the run is done, there is a last grid, of its final step.
    """

    every: Every = field(
        default=Every(1000), converter=parse_every, metadata=about("how often; 0: only when the run is done")
    )
    num: int = field(default=64, validator=[ge(1), le(1_000_000)], metadata=about("number of images"))
    seed: int = field(default=0, validator=ge(0), metadata=about("seed of the noise"))
    columns: int | None = field(
        default=None, validator=optional(ge(1)), metadata=about("images in a row; without it a nearly square grid")
    )
    scale: int | None = field(
        default=None,
        validator=optional([ge(1), le(1000)]),
        metadata=about("factor of enlargement; without it, to about 64 pixels"),
    )
    weights: str | None = field(
        default=None, metadata=about('"model", or the name of an average to sample with; without it an average if any')
    )

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        loop.sample(SampleRequest(0, weights=self.weights))  # refuses unknown weights before the run starts

    def act(self, loop: Loop) -> None:
        """Make the images, on the main rank."""
        if not loop.is_main:
            return
        step = loop.progress.step
        # A part of this size fits into memory, as it does in training; the images do not depend on the size.
        size = loop.config.micro_batch or loop.config.batch_size
        requests = [
            SampleRequest(min(size, self.num - start), self.seed, start, weights=self.weights)
            for start in range(0, self.num, size)
        ]
        images = torch.cat([loop.sample(request).images.cpu() for request in requests])
        if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
            log.warning("samples at step %d: %d of %d images are not finite (NaN is black)", step, broken, self.num)
            images = images.nan_to_num(nan=-1.0, posinf=1.0, neginf=-1.0)
        loop.log.images({"samples": images})
        if loop.run_dir is not None:
            path = loop.run_dir / "samples" / f"step-{step:08d}.png"
            try:
                save_grid(images, path, self.columns, self.scale)
            except OSError as error:
                log.warning("samples: %s cannot be written: %s", path, error.strerror or error)
