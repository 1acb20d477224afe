"""The features of images that a Loop samples, and the base of plugins that compare them with the data."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import closing, nullcontext
from typing import ClassVar

from attrs import converters, define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff.authors.measured_images import InOrder, MeasuredImages
from hookdiff.authors.periodic import Periodic
from hookdiff.data.picture_sizes import picture_shapes
from hookdiff.errors import UserError
from hookdiff.features.collected import Collected
from hookdiff.features.reference import shares
from hookdiff.features.space import Features, Space, usual_features
from hookdiff.log.pixels import to_uint8
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import saved
from hookdiff.machine.network import is_closed, no_connections
from hookdiff.machine.ranks import gathered, gathered_or_raised
from hookdiff.models.sample_request import SampleRequest
from hookdiff.options.choices import chosen
from hookdiff.options.default_names import DEFAULT_FEATURES, FEATURES_OF_OTHERS
from hookdiff.options.fields import about
from hookdiff.options.imports import TRUST
from hookdiff.options.structure import COUNT
from hookdiff.terminal.pace import paced

_USUAL = ", ".join(f'"{name}" for {" x ".join(map(str, shape))}' for shape, name in DEFAULT_FEATURES.items())


@define(eq=False)
class Generated:
    """Images sampled with the current weights, and their features. See `MeasuredImages`.

    Raises:
        UserError: for unknown weights, and for features that do not accept images of these shapes.
    """

    loop: Loop
    choice: Features | None  # None: the default for the shapes of the images
    seed: int
    weights: str | None  # "model" or the name of an average; None: an average if there is one
    is_strangers: bool = False  # whether the config is untrusted; features then open without the network
    space: Space = field(init=False)
    _images: MeasuredImages = field(init=False)

    def __attrs_post_init__(self) -> None:
        shapes = picture_shapes(self.loop.feed)
        features = self.choice or usual_features(*shapes)
        for shape in shapes:
            features.check(shape)
        with no_connections(TRUST) if self.is_strangers else nullcontext():
            self.space = features.open(self.loop.device)
        for shape in shapes:
            self.space.check(shape)
        self._images = MeasuredImages(self.loop, self.seed, self.weights)
        self.used()

    @property
    def at_a_time(self) -> int:
        """The number of images that all ranks together sample at a time; all ranks must read this property together."""
        return min(gathered(self._images.at_a_time)) * self.loop.num_ranks

    @property
    def num_sizes(self) -> int:
        """The number of sizes of the images; a batch has one size."""
        return len(picture_shapes(self.loop.feed))

    def used(self) -> str:
        """Return the name of the weights that sample now, such as "ema"; with guidance by a plugin, "ema with NAME"."""
        samples = self.loop.sample(SampleRequest(0, weights=self.weights))
        usual, used = (each.guidance if each else None for each in (self.loop.sampler, samples.sampler))
        return samples.weights if used is None or used is usual else f"{samples.weights} with {used.use}"

    def image(self, number: int) -> Tensor:
        """Return the image with this `number`, c h w, float32, on the CPU; all ranks must call this."""
        _, images = next(self._images.parts(range(number, number + 1)))
        return images[0]

    def features(self, num: int, what: str) -> Collected:
        """Return the features of the first `num` images, rounded to 8 bits as in a file; each rank samples a share.

        The rows are in the order of the images. `what` names the images in messages, such as "fid: images".

        Raises:
            UserError: on all ranks, if the features of images of several sizes differ in their dimension.
            ValueError: on all ranks, if an image is not finite.
        """
        rank = self.loop.rank
        start, end = shares(num)[rank]
        # The same number on all ranks, because ranks with a sharded model must call it equally often.
        most = max(last - first for first, last in shares(num))
        of_ranks = [range(first, first + most) for first, _ in shares(num)]
        features, problems = Collected(), list[Exception]()
        in_order = InOrder(features, start)
        with closing(paced(self._images.parts(of_ranks[rank]), most, what, size=lambda part: len(part[0]))) as parts:
            for numbers, images in parts:
                kept = [row for row, number in enumerate(numbers) if number < end]
                try:
                    if not problems:
                        in_order.add([numbers[row] for row in kept], *self.space(_pixels(images[kept], what)))
                except Exception as error:  # raised below: all ranks of a sharded model must continue
                    problems.append(error)
        for _ in range(self._images.missing(of_ranks, rank)):
            self.image(0)

        def share() -> Collected:
            if problems:
                raise problems[0]
            return features

        return Collected.merged(gathered_or_raised(share))


@define(eq=False)
class ImageMetric(Periodic):
    """The base of plugins that compare generated images with the data, by features of both."""

    section: ClassVar[str]  # name of the plugin, for messages

    features: Features | None = field(
        default=None,
        kw_only=True,
        converter=converters.optional(chosen[Features]),
        metadata=about(f'features to compare; default: {_USUAL}, else "{FEATURES_OF_OTHERS}"'),
    )
    seed: int = field(default=0, kw_only=True, validator=ge(0), metadata=about("seed of the noise"))
    weights: str | None = field(
        default=None,
        kw_only=True,
        metadata=about('weights that sample: "model", or the name of an average; default: an average if there is one'),
    )
    space: Space = field(init=False)
    generated: Generated = field(init=False)
    _acted_at: int | None = saved(None, key="measured_at", validator=COUNT)
    _is_strangers: bool = field(init=False, factory=is_closed)  # whether the config is untrusted

    @hookimpl(specname="on_start")
    def _open(self, loop: Loop) -> None:
        try:
            self.generated = Generated(loop, self.features, self.seed, self.weights, self._is_strangers)
            self.space = self.generated.space
            self.prepare(loop)
        except UserError as error:
            raise UserError(f"[plugins.{self.section}] {error}") from None

    @abstractmethod
    def prepare(self, loop: Loop) -> None:
        """Prepare before the run starts; raise UserError if it cannot be measured (the plugin's name is added)."""

    @abstractmethod
    def measure(self, loop: Loop) -> dict[str, float]:
        """Generate images with the current weights, log their metrics, and return these by name.

        Raises:
            ValueError: if an image is not finite.
        """

    def act(self, loop: Loop) -> None:
        self.measure(loop)


def _pixels(images: Tensor, what: str) -> Tensor:
    if bad := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
        raise ValueError(f"{what}: {bad} of {len(images)} generated images are not finite")
    return to_uint8(images)
