"""The plugin `fid`."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from attrs import define, field
from attrs.validators import deep_iterable, ge, in_, le

from hookdiff import Every, Loop, UserError, hookimpl, parse_every, saved
from hookdiff.authors import ImageMetric
from hookdiff.features import Collected, Gaussian, data_features
from hookdiff.machine import first_rank_says, gathered_or_raised
from hookdiff.options import COUNT, about, is_time
from hookdiff.terminal import duration, in_words
from hookdiff_fid.compare import METRICS, Metric, compare, floor_of, too_few
from hookdiff_fid.statistics import read_statistics

logger = logging.getLogger("hookdiff")

_FEWEST = 100  # samples, whatever the time budget: with fewer, the bias hides how good the model is


@define(eq=False)
class FID(ImageMetric):
    """Logs the Fréchet distance of generated images to the training set, and other metrics of the same features.

    In the space of Inception with the published weights, the distance is logged as `fid/NAME`, in other spaces as
    `fd/NAME`. NAME is the space with its recipe; each space has a scale of its own. The distance falls as the number of
    samples grows, so that number is logged as `fd/NAME/num`. `fd/NAME/floor` is the distance that a perfect model would
    have with as many samples, measured on training images. Compare only values with the same NAME and as many samples.

    If the training pictures have several sizes, each image has the size of a random training picture. The images are
    rounded to 8 bits, as in a saved file. Each measurement uses the same noise, so that a curve shows the training and
    not chance. The features of the data are kept in the user's cache.
    """

    section = "fid"

    every: Every = field(default=Every(1000), converter=parse_every, metadata=about("how often; 0: only at the end"))
    num_samples: int = field(default=1000, validator=[ge(2), le(10_000_000)], metadata=about("images per measurement"))
    time_budget: Every = field(
        default=Every(0, "seconds"),
        converter=parse_every,
        validator=is_time,
        metadata=about(
            'time for a measurement, such as "3 min"; the first measurement chooses the number of samples that fit, '
            "at most `num_samples`; 0: no limit"
        ),
    )
    metrics: tuple[Metric, ...] = field(
        default=METRICS,
        validator=deep_iterable(in_(METRICS)),
        metadata=about(
            'other metrics: "kid"; "precision", with recall, density and coverage; "is", the Inception Score'
        ),
    )
    reference: str | None = field(
        default=None,
        metadata=about("file of published statistics (.npz with mu and sigma) to compare with, in place of the data"),
    )
    num: int | None = saved(None, validator=COUNT)  # images per measurement; None: not yet known
    target: Collected | Gaussian = field(init=False)  # the features of the data, or the published statistics
    floor: float | None = field(init=False, default=None)
    _is_ready: bool = field(init=False, default=False)

    def prepare(self, loop: Loop) -> None:
        if self.reference:
            self.target = read_statistics(Path(self.reference).expanduser())
        elif (num := len(loop.feed.training)) < 2 and not loop.end.reason:
            raise UserError(f"needs at least 2 training images, got {num}")
        self._is_ready, self.floor = False, None

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        """Read the data, and announce the cost of a measurement."""
        self._is_ready = True
        if not self.reference:
            try:
                pictures = loop.feed.pictures
            except UserError as error:
                raise UserError(f"fid: {error}; set plugins.fid.reference, a file of statistics") from None
            self.target = data_features(pictures, loop.feed.training, self.space, "fid: the training images")
        first = self.generated.features(loop.num_ranks, "fid: images")  # the first call takes longer than later calls
        if isinstance(self.target, Gaussian) and first.moments.dim != len(self.target.mean):
            counts = f"{len(self.target.mean):,} features, the space {self.space.name!r} has {first.moments.dim:,}"
            raise UserError(f"[plugins.fid] reference = {self.reference!r} has {counts}; choose another `features`")
        before, limit, most = self.num, self.time_budget.amount, self.num_samples
        self.num = (before and min(before, most)) if limit else most
        if self.num is None:
            count, cost = f"at most {most:,}", f"about {in_words(limit)}"
        else:
            # Plugins such as autoguidance may make samples slower, but only during the training.
            is_lower_bound = any(hook.plugin_name in loop.plugins for hook in loop.plugins.order("sample"))
            count = f"{self.num:,}"
            cost = f"{'at least' if is_lower_bound else 'about'} {in_words(self.num * self._seconds())}"
        if loop.is_main:
            unit = " steps" if self.every.unit == "steps" else ""
            when = f"every {self.every}{unit}" if self.every.amount else "at the end"
            logger.info("fid: %s samples in the space %s, %s, %s", count, self.space.name, cost, when)
            if before not in (None, self.num):
                counts = f"{self.num:,} samples per measurement from now on, {before:,} before"
                logger.warning("fid: %s: do not compare the values (keep_best compares only equal numbers)", counts)

    def _seconds(self) -> float:
        """Return the seconds that a sample takes now, measured on a batch, or about a batch of each size."""
        start, at_once = time.monotonic(), self.generated.at_a_time * self.generated.num_sizes
        first = min(self.num_samples, at_once)
        self.generated.features(first, "fid: images")
        return (time.monotonic() - start) / first

    def _fitting(self, loop: Loop) -> int:
        """Return the number of samples for the time budget."""
        each, limit, most = self._seconds(), self.time_budget.amount, self.num_samples
        num = first_rank_says(max(min(_FEWEST, most), min(most, int(limit / each))))
        if loop.is_main and num * each > 1.2 * limit:
            longer = f"so a measurement takes longer than {in_words(limit)}"
            logger.warning("fid: fewer than %d samples would say nothing, %s", num, longer)
        return num

    def measure(self, loop: Loop) -> dict[str, float]:
        if not self._is_ready:  # the run has no step left
            self.on_ready(loop)
        if self.num is None:
            self.num = self._fitting(loop)
        start = time.monotonic()
        made, weights = self.generated.features(self.num, "fid: images"), self.generated.used()
        values = gathered_or_raised(lambda: self._compare(made) if loop.is_main else {})[0]
        distance = self.space.distance
        loop.log({distance: values[distance]})
        loop.log({name: value for name, value in values.items() if name != distance}, detail=True)
        if loop.is_main:
            against = f"{self.target.num:,} of the data" if isinstance(self.target, Collected) else self.reference
            floor = f", about {self.floor:.4g} for a perfect model" if self.floor is not None else ""
            if self.floor is not None and values[distance] < self.floor:
                floor += f" (slightly less is within the noise of {self.num:,} images)"
            floor += f", {lacking}" if (lacking := too_few(made, self.target, self.metrics)) else ""
            message = "%s %.4g at step %s: %s images of %s against %s%s, %s"
            took = duration(time.monotonic() - start)
            counts = (f"{loop.progress.step:,}", f"{self.num:,}", weights, against, floor, took)
            logger.info(message, distance, values[distance], *counts)
        return values

    def _compare(self, made: Collected) -> dict[str, float]:
        values = compare(self.space, made, self.target, self.metrics)
        values[f"{self.space.distance}/num"] = float(made.num)
        if self.floor is None and isinstance(self.target, Collected):
            self.floor = floor_of(self.target, made.num)
        if self.floor is not None:
            values[f"{self.space.distance}/floor"] = self.floor
        return values
