"""The plugin `diversity`."""

from __future__ import annotations

import time

from attrs import define, field
from attrs.validators import ge, le, optional
from torch import Tensor

from hookdiff import Alarms, Every, Finding, Loop, UserError, hookimpl, parse_every, saved
from hookdiff.authors import ImageMetric
from hookdiff.features import ROWS, Collected, data_features
from hookdiff.log import grid, padded, to_uint8
from hookdiff.machine import gathered_or_raised
from hookdiff.options import about
from hookdiff.terminal import duration
from hookdiff_diversity.copies import Copies, copies
from hookdiff_diversity.diagnosis import KINDS, Diagnosis, diagnose_samples
from hookdiff_diversity.modes import modes
from hookdiff_diversity.spread import spread

_MODES = 20  # of data without classes
_MOST_MODES = 100
_HELD_OUT = 100  # images; of fewer, 1% is less than an image
_MOST_SEARCHED = 100_000  # training images among which copies are searched: 800 MB of features of Inception
_PAIRS = 8  # in the picture


@define(eq=False)
class Diversity(ImageMetric):
    """Reports whether generated images are diverse: healthy, collapsed to few modes, copies, or too uniform.

    It compares features of generated images with features of the training set: their variance and distances, the
    clusters of the data that they cover, and the distance of each to its nearest training image, beside that of
    held-out images. Any diagnosis except healthy is a warning with its numbers. The images that are most like copies
    are drawn beside their nearest training images, in `diversity/step-00001000.png` of the run directory.
    """

    section = "diversity"

    every: Every = field(default=Every(5000), converter=parse_every, metadata=about("how often; 0: only at the end"))
    num_samples: int = field(default=1000, validator=[ge(20), le(10_000)], metadata=about("images per measurement"))
    modes: int | None = field(
        default=None,
        validator=optional([ge(2), le(10_000)]),
        metadata=about(
            f"clusters of the data; default: the number of classes (at most {_MOST_MODES}), or {_MODES} without classes"
        ),
    )
    diagnosis: Diagnosis | None = field(init=False, default=None)  # the newest, on all ranks
    _training: Collected | None = field(init=False, default=None)
    _held_out: Collected | None = field(init=False, default=None)
    _alarms: Alarms = saved(factory=Alarms)

    def prepare(self, loop: Loop) -> None:
        if len(loop.feed.training) < 2 * _PAIRS and not loop.end.reason:
            raise UserError(f"needs at least {2 * _PAIRS} training images")
        self._training, self._held_out = None, None

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        """Raise UserError if the samples of the data are latents, without pictures."""
        try:
            _ = loop.feed.pictures
        except UserError as error:
            raise UserError(f"diversity: {error}") from None

    def measure(self, loop: Loop) -> dict[str, float]:
        start = time.monotonic()
        feed = loop.feed
        if self._training is None:
            what = "diversity: the training images"
            self._training = data_features(feed, feed.training, self.space, what, _MOST_SEARCHED)
            if len(feed.held_out_indices) >= _HELD_OUT:
                held_out = feed.held_out_indices
                self._held_out = data_features(feed, held_out, self.space, "diversity: the images held out")
        images = self.generated.features(self.num_samples, "diversity: images")
        comparison = gathered_or_raised(lambda: self._compare(loop, images.rows) if loop.is_main else None)[0]
        assert comparison is not None
        values, self.diagnosis, near = comparison
        place = f"diversity/{self.space.name}"
        loop.log({f"{place}/{name}": value for name, value in values.items()}, detail=True)
        self._report(loop, self.diagnosis, time.monotonic() - start)
        self._draw(loop, near)
        return values

    def _report(self, loop: Loop, diagnosis: Diagnosis, seconds: float) -> None:
        what = f"diversity: the samples are {diagnosis.kind}"
        finding = Finding("warning", what, diagnosis.why, diagnosis.remedy) if diagnosis.remedy else None
        step = loop.progress.step
        alarms = [self._alarms.news(step, kind, finding if kind == diagnosis.kind else None) for kind in KINDS]
        news = next(filter(None, alarms), None)
        loop.log.report(news or Finding("info", f"{what}: {diagnosis.why} ({duration(seconds)})"))

    def _compare(self, loop: Loop, samples: Tensor) -> tuple[dict[str, float], Diagnosis, Copies]:
        assert self._training is not None
        classes = loop.feed.num_classes or 0
        num = self.modes or (min(classes, _MOST_MODES) if classes > 1 else _MODES)
        training, held_out = self._training.rows, None if self._held_out is None else self._held_out.rows
        apart = spread(samples, training[:ROWS])
        covered = modes(samples, training[:ROWS], num, self.seed)
        near = copies(samples, training, held_out, self._training.num)
        values = {
            "num": len(samples),
            "variance_ratio": apart.variance_ratio,
            "distance": apart.distance,
            "distance_ratio": apart.distance_ratio,
            "mode_coverage": covered.coverage,
            "modes_covered": covered.covered,
            "dominant_mode": covered.dominant,
            "memorised": near.memorised,
            "searched": near.searched,
            "nearest_ratio": near.nearest_ratio,
        }
        return {name: float(value) for name, value in values.items()}, diagnose_samples(apart, covered, near), near

    def _draw(self, loop: Loop, near: Copies) -> None:
        """Draw the samples that are most like copies, each beside its nearest training image."""
        assert self._training is not None
        assert self._training.numbers is not None
        chosen = near.closest[:_PAIRS]
        # The images are generated again, since all of them would not fit in memory.
        samples = [self.generated.image(number) for number in chosen.tolist()]
        originals = self._training.numbers[near.numbers[chosen]]
        if not loop.is_main:
            return
        nearest = self._pictures(loop, originals)
        pairs = [to_uint8(image[None])[0] for pair in zip(samples, nearest, strict=True) for image in pair]
        labels = [("sample", f"data, {distance:.2g}") for distance in near.distances[chosen].tolist()]
        captions = [text for pair in labels for text in pair]
        loop.log.images({"diversity": grid(padded(pairs), _PAIRS, captions=captions)})

    def _pictures(self, loop: Loop, indices: Tensor) -> list[Tensor]:
        """Return the pictures of the data with these `indices`: c h w each, perhaps of several sizes."""
        feed = loop.feed.pictures
        images = [image for batch in feed.unaugmented(indices, len(indices)) for image in batch.inputs]
        by_index = dict(zip(feed.arranged(indices).tolist(), images, strict=True))
        return [by_index[index] for index in indices.tolist()]
