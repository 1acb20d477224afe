"""Measures generated images against the training data while a run is under way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

import torch
from attrs import define, field, validators
from torch import Tensor

from hookdiff import Due, Every, Loop, Reason, SampleRequest, Samples, UserError, hookimpl, parse_every
from hookdiff_fid.digits import load_digits_net
from hookdiff_fid.frechet import Moments, frechet_distance

logger = logging.getLogger("hookdiff")


class FeatureNet(Protocol):
    """Turns images n c h w, float32 in [-1, 1] on the CPU, into features n d, float32."""

    shape: tuple[int, ...]  # c h w: the images it takes

    def __call__(self, images: Tensor, /) -> Tensor: ...


FEATURES: dict[str, Callable[[], FeatureNet]] = {"digits": load_digits_net}  # each in eval mode


@define(eq=False)
class FID:
    """Logs the Fréchet distance of generated images to the whole training set as `fd/NAME`, NAME being `features`.

    With Inception features the distance is called FID; with others it is on a scale of its own. It falls with the
    number of samples (see `frechet_distance`), so compare numbers of equal `num_samples`, features and data. Images
    are clipped to [-1, 1] first, as they are when saved. They come from the same noise each time, so that a curve
    shows the training and not the draw. A run that is done is measured once more where it ends.
    """

    every: Every = field(default=Every(1000), converter=parse_every)  # 0: only at the end
    num_samples: int = field(default=1000, validator=validators.ge(2))  # images made for a measurement
    features: str = field(default="digits", validator=validators.in_(tuple(FEATURES)))
    seed: int = field(default=0, validator=validators.ge(0))  # of the images' noise
    weights: str | None = None  # "model", or the name of an average; None: an average if there is one
    batch_size: int = field(default=256, validator=validators.ge(1))  # images at a time
    net: FeatureNet = field(init=False)
    reference: Moments = field(init=False)  # of the training data
    due: Due = field(init=False)
    last: int | None = field(init=False, default=None)  # the step measured last

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self.net = FEATURES[self.features]()
        if loop.feed.shape != self.net.shape:
            expected, got = (" x ".join(map(str, shape)) for shape in (self.net.shape, loop.feed.shape))
            raise UserError(f"[plugins.fid] features = {self.features!r} takes images {expected}, the data has {got}")
        loop.sample(SampleRequest(0, weights=self.weights))  # what cannot be had is told now
        if loop.is_main:
            logger.info("fid: %d images %s", self.num_samples, _when(self.every))
        real = _training_images(loop, self.batch_size)
        self.reference = Moments.from_chunks(self._features(images, "images of the data") for images in real)
        self.due, self.last = Due(self.every), None

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if self.due.after_step(loop.progress.step):
            self.measure(loop)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        if self.due.after_epoch(loop.progress.epoch):
            self.measure(loop)

    @hookimpl
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason == "done" and self.last != loop.progress.step:
            self.measure(loop)

    def measure(self, loop: Loop) -> float:
        """Make images with the weights of now, log their distance to the data, and return it.

        Raises ValueError when an image is not finite.
        """
        began = time.monotonic()
        made = self._make(loop)
        first = next(made)
        images = (samples.images for samples in chain([first], made))
        moments = Moments.from_chunks(self._features(chunk, "generated images") for chunk in images)
        distance = frechet_distance(moments, self.reference)
        self.last = loop.progress.step
        loop.log({f"fd/{self.features}": distance})
        if loop.is_main:
            told = self.features, distance, self.last, moments.num, first.weights, self.reference.num
            message = "fd/%s %.4g at step %d: %d images of %s against %d of the data, %.1f s"
            logger.info(message, *told, time.monotonic() - began)
        return distance

    def _make(self, loop: Loop) -> Iterator[Samples]:
        for start in range(0, self.num_samples, self.batch_size):
            num = min(self.batch_size, self.num_samples - start)
            yield loop.sample(
                SampleRequest(num=num, seed=self.seed, start=start, stream="evaluate", weights=self.weights)
            )

    @torch.no_grad()
    def _features(self, images: Tensor, what: str) -> Tensor:
        if bad := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
            raise ValueError(f"fid: {bad} of {len(images)} {what} are not finite")
        # On the CPU, so that the same images give the same number on every machine: a GPU rounds the inputs of
        # convolutions to TF32 unless told otherwise.
        return self.net(images.float().clamp(-1, 1).cpu())


def _when(every: Every) -> str:
    if not every.amount:
        return "at the end"
    return f"every {every} steps" if every.unit == "steps" else f"every {every}"


def _training_images(loop: Loop, batch_size: int) -> Iterator[Tensor]:
    """Yield each image that `loop` trains on once, n c h w, without what varies it at random."""
    return (batch.inputs for batch in loop.feed.unaugmented(loop.feed.training, batch_size))
