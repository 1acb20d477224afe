"""The plugin `fid`."""

import logging
import time

import torch
from attrs import define, field
from attrs.validators import ge, in_, le
from torch import Tensor

from hookdiff import Every, Loop, Periodic, SampleRequest, UserError, hookimpl, parse_every
from hookdiff.options import about
from hookdiff_fid.digits import DigitsNet, load_digits_net
from hookdiff_fid.frechet import Moments, frechet_distance

logger = logging.getLogger("hookdiff")


FEATURES = {"digits": load_digits_net}  # functions that return a network in eval mode


@define(eq=False)
class FID(Periodic):
    """Logs the Fréchet distance of generated images to the whole training set as `fd/NAME`, NAME being `features`.

    With features of Inception the distance is called FID; with others it has a scale of its own. It falls with the
    number of samples (see `frechet_distance`), so compare values only if `num_samples`, features and data are equal.
    Images are clipped to [-1, 1], as they are when saved. Each measurement uses the same noise, so that a curve shows
    the progress of the training and not that of chance.
    """

    every: Every = field(
        default=Every(1000), converter=parse_every, metadata=about("how often; 0: only when the run is done")
    )
    num_samples: int = field(
        default=1000, validator=[ge(2), le(10_000_000)], metadata=about("images generated for a measurement")
    )
    features: str = field(default="digits", validator=in_(tuple(FEATURES)), metadata=about("network for the features"))
    seed: int = field(default=0, validator=ge(0), metadata=about("seed of the noise"))
    weights: str | None = field(
        default=None, metadata=about('"model", or the name of an average to sample with; without it an average if any')
    )
    batch_size: int = field(default=256, validator=ge(1), metadata=about("images generated and measured at a time"))
    net: DigitsNet = field(init=False)
    reference: Moments = field(init=False)  # of the training data

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self.net = FEATURES[self.features]()
        if loop.feed.shape != self.net.shape:
            expected, got = (" x ".join(map(str, shape)) for shape in (self.net.shape, loop.feed.shape))
            raise UserError(f"[plugins.fid] features = {self.features!r} takes images {expected}, the data has {got}")
        loop.sample(SampleRequest(0, weights=self.weights))  # refuses unknown weights before the run starts
        if loop.is_main:
            unit = " steps" if self.every.unit == "steps" else ""
            when = f"every {self.every}{unit}" if self.every.amount else "at the end"
            logger.info("fid: %d images %s", self.num_samples, when)
        real = loop.feed.unaugmented(loop.feed.training, self.batch_size)
        self.reference = Moments.from_chunks(self._features(batch.inputs, "images of the data") for batch in real)

    def act(self, loop: Loop) -> None:
        """Measure the current weights."""
        self.measure(loop)

    def measure(self, loop: Loop) -> float:
        """Generate images with the current weights, log their distance to the data, and return it.

        Raises ValueError for an image that is not finite.
        """
        start_time = time.monotonic()
        moments: Moments | None = None
        for start in range(0, self.num_samples, self.batch_size):
            num = min(self.batch_size, self.num_samples - start)
            made = loop.sample(SampleRequest(num, self.seed, start, stream="evaluate", weights=self.weights))
            chunk = Moments.from_features(self._features(made.images, "generated images"))
            moments = moments.merge(chunk) if moments else chunk
        assert moments
        distance = frechet_distance(moments, self.reference)
        loop.log({f"fd/{self.features}": distance})
        if loop.is_main:
            message = "fd/%s %.4g at step %d: %d images of %s against %d of the data, %.1f s"
            counts = (loop.progress.step, moments.num, made.weights, self.reference.num)
            logger.info(message, self.features, distance, *counts, time.monotonic() - start_time)
        return distance

    @torch.no_grad()
    def _features(self, images: Tensor, source: str) -> Tensor:
        if bad := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
            raise ValueError(f"fid: {bad} of {len(images)} {source} are not finite")
        # On the CPU, so that the same images give the same number on every machine: by default a GPU rounds the
        # inputs of convolutions to TF32.
        features: Tensor = self.net(images.float().clamp(-1, 1).cpu())
        return features
