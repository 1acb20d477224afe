"""Samples many images with a Loop, and computes their features, in batches that fit in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from typing import ClassVar

import torch
from attrs import converters, define, evolve, field
from attrs.validators import ge
from torch import Tensor

from hookdiff.authors.periodic import Periodic
from hookdiff.data.picture_sizes import Size, picture_shapes, size_name, trained_near
from hookdiff.errors import UserError
from hookdiff.features.collected import Collected
from hookdiff.features.reference import shares
from hookdiff.features.space import Features, Space, usual_features
from hookdiff.log.pixels import to_uint8
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import saved
from hookdiff.machine.dtensor import is_sharded
from hookdiff.machine.fitting import Fitting, is_out_of_memory
from hookdiff.machine.network import is_closed, no_connections
from hookdiff.machine.ranks import gathered, gathered_or_raised
from hookdiff.models.sample_request import SampleRequest
from hookdiff.models.sampler import Sampler
from hookdiff.options.choices import chosen
from hookdiff.options.default_names import DEFAULT_FEATURES, FEATURES_OF_OTHERS
from hookdiff.options.fields import about
from hookdiff.options.imports import TRUST
from hookdiff.options.structure import COUNT
from hookdiff.terminal.pace import paced

# Limits of a batch on a CPU: a larger batch takes more memory, and no less time. See benchmarks/README.md.
_VALUES_ON_CPU = 1 << 16
_FEWEST_ON_CPU = 16

_USUAL = ", ".join(f'"{name}" for {" x ".join(map(str, shape))}' for shape, name in DEFAULT_FEATURES.items())


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
            if not self._near or isinstance(error, UserError) or is_out_of_memory(error):
                raise
            assert self.size is not None
            refused = f"size {size_name(self.size)}: the network makes no pictures of this size: {error}"
            raise UserError(f"{refused}; nearest trained sizes: {', '.join(map(size_name, self._near))}") from error


@define(eq=False)
class Generated:
    """Images sampled with the current weights, and their features. The number of an image sets its noise and class.

    Raises:
        UserError: for unknown weights, and for features that do not accept images of this shape.
    """

    loop: Loop
    choice: Features | None  # None: the default for the shape of the images
    seed: int
    weights: str | None  # "model" or the name of an average; None: an average if there is one
    is_strangers: bool = False  # whether the config is untrusted; features then open without the network
    space: Space = field(init=False)
    _maker: ImageMaker = field(init=False)

    def __attrs_post_init__(self) -> None:
        shape = self.loop.feed.picture_shape
        features = self.choice or usual_features(shape)
        features.check(shape)
        with no_connections(TRUST) if self.is_strangers else nullcontext():
            self.space = features.open(self.loop.device)
        self.space.check(shape)
        self._maker = ImageMaker(self.loop)
        self.used()

    @property
    def at_a_time(self) -> int:
        """The number of images that all ranks together sample at a time; all ranks must read this property together."""
        return min(gathered(self._maker.at_a_time)) * self.loop.num_ranks

    def used(self) -> str:
        """Return the name of the weights that sample now, such as "ema"; with guidance by a plugin, "ema with NAME"."""
        samples = self.loop.sample(SampleRequest(0, weights=self.weights))
        usual, used = (each.guidance if each else None for each in (self.loop.sampler, samples.sampler))
        return samples.weights if used is None or used is usual else f"{samples.weights} with {used.use}"

    def images(self, numbers: range) -> Iterator[Tensor]:
        """Yield the images with these `numbers` in batches, n c h w, float32; all ranks must call this."""

        def request(part: range) -> SampleRequest:
            return SampleRequest(len(part), self.seed, part.start, stream="evaluate", weights=self.weights)

        return self._maker.make(numbers, request)

    def features(self, num: int, what: str) -> Collected:
        """Return the features of the first `num` images, rounded to 8 bits as in a file; each rank samples a share.

        `what` names the images in messages, such as "fid: images".

        Raises:
            ValueError: on all ranks, if an image is not finite.
        """
        start, end = shares(num)[self.loop.rank]
        # The same number on all ranks, because ranks with a sharded model must call it equally often.
        most = max(last - first for first, last in shares(num))
        features, problems = Collected(), list[Exception]()
        with closing(paced(self.images(range(start, start + most)), most, what)) as parts:
            for part in _first(parts, end - start):
                try:
                    if not problems:
                        features.add(*self.space(_pixels(part, what)))
                except Exception as error:  # raised below: all ranks of a sharded model must continue
                    problems.append(error)

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


def _first(parts: Iterable[Tensor], num: int) -> Iterator[Tensor]:
    """Yield the first `num` images of `parts`; all parts are sampled, even those that are not needed."""
    for part in parts:
        yield part[: max(0, num)]
        num -= len(part)


def _pixels(images: Tensor, what: str) -> Tensor:
    if bad := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
        raise ValueError(f"{what}: {bad} of {len(images)} generated images are not finite")
    return to_uint8(images)
