"""The plugin `samples`."""

from __future__ import annotations

import logging

import torch
from attrs import define, field
from attrs.validators import ge, optional
from torch import Tensor

from hookdiff import Due, Every, Loop, Reason, SampleRequest, hookimpl, parse_every
from hookdiff.disk import save_grid

log = logging.getLogger("hookdiff")


@define(eq=False)
class SampleGrid:
    """Makes images from the same noise again and again, so that one can see the model learn.

    They go to `samples/step-00001000.png` in the run directory, if there is one, and to the sinks. The end of a run
    that is done brings one more grid, unless its last step just had one.
    """

    every: Every = field(default=Every(1000), converter=parse_every)  # 0: only when the run is done
    num: int = field(default=64, validator=ge(1))  # images
    seed: int = field(default=0, validator=ge(0))  # of the noise
    columns: int | None = field(default=None, validator=optional(ge(1)))  # None: nearest to a square
    scale: int | None = field(default=None, validator=optional(ge(1)))  # of each pixel; None: images of about 64 pixels
    weights: str | None = None  # "model", or the name of an average; None: an average if there is one
    _due: Due = field(init=False)
    _made_at: int | None = field(init=False, default=None)  # step of the last grid

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._due = Due(self.every)
        loop.sample(SampleRequest(0, weights=self.weights))  # what cannot be had is told now

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if self._due.after_step(loop.progress.step):
            self._make(loop)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        if self._due.after_epoch(loop.progress.epoch):
            self._make(loop)

    @hookimpl
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason == "done" and self._made_at != loop.progress.step:
            self._make(loop)

    def _make(self, loop: Loop) -> None:
        if not loop.is_main:
            return
        step = self._made_at = loop.progress.step
        images = self._sample(loop)
        if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
            log.warning("samples at step %d: %d of %d images are not finite (nan is black)", step, broken, self.num)
            images = images.nan_to_num(nan=-1.0, posinf=1.0, neginf=-1.0)
        loop.log.images({"samples": images})
        if loop.run_dir is not None:
            path = loop.run_dir / "samples" / f"step-{step:08d}.png"
            try:
                save_grid(images, path, self.columns, self.scale)
            except OSError as error:
                log.warning("samples: %s cannot be written: %s", path, error.strerror or error)

    def _sample(self, loop: Loop) -> Tensor:
        # What fits in memory in training fits here; the images do not depend on how they are divided.
        size = loop.config.micro_batch or loop.config.batch_size
        requests = [
            SampleRequest(min(size, self.num - start), self.seed, start, weights=self.weights)
            for start in range(0, self.num, size)
        ]
        return torch.cat([loop.sample(request).images.cpu() for request in requests])
