"""Makes many images with a Loop, and their features, with as many images at a time as fit in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from typing import ClassVar

import torch
from attrs import converters, define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff.authors.periodic import Periodic
from hookdiff.errors import UserError
from hookdiff.features.collected import Collected
from hookdiff.features.reference import shares
from hookdiff.features.space import Features, Space, usual_features
from hookdiff.log.pixels import to_uint8
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import saved
from hookdiff.machine.dtensor import is_sharded
from hookdiff.machine.fitting import Fitting
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

# Limits of the images that a CPU makes at a time: more take memory, and no less time. See benchmarks/README.md.
_VALUES_ON_CPU = 1 << 16
_FEWEST_ON_CPU = 16

_USUAL = ", ".join(f'"{name}" for {" x ".join(map(str, shape))}' for shape, name in DEFAULT_FEATURES.items())


@define(eq=False)
class ImageMaker:
    """Makes images in parts of the sampler's `batch_size`, which is halved whenever a part does not fit in memory."""

    loop: Loop
    _fitting: Fitting = field(init=False)

    def __attrs_post_init__(self) -> None:
        limit = self.loop.sampler.batch_size if self.loop.sampler else Sampler.batch_size
        values = torch.Size(self.loop.feed.picture_shape).numel()
        size = limit if self.loop.device.type != "cpu" else min(limit, max(_FEWEST_ON_CPU, _VALUES_ON_CPU // values))
        self._fitting = Fitting(size, self.loop.device, any(map(is_sharded, self.loop.model.parameters())))

    @property
    def size(self) -> int:
        """The number of images in a part."""
        return self._fitting.size

    def make(self, numbers: range, request: Callable[[range], SampleRequest]) -> Iterator[Tensor]:
        """Yield the images `numbers` in parts: n c h w, float32, on the CPU. `request(part)` returns their request.

        Raises:
            UserError: if not even one image fits, or if a part does not fit and the ranks share the model.
        """
        return self._fitting.parts(numbers, lambda part: self.loop.sample(request(part)).images.cpu())


@define(eq=False)
class Generated:
    """Images of the current weights, and their features. The number of an image determines its noise and its class.

    Raises:
        UserError: for unknown weights, and for features that do not take the images.
    """

    loop: Loop
    choice: Features | None  # None: the usual features of such images
    seed: int
    weights: str | None  # "model" or the name of an average; None: an average if there is one
    is_strangers: bool = False  # whether the config is not trusted, so that features are opened without connections
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
        """The number of images that all ranks together make at a time; all ranks must read it together."""
        return min(gathered(self._maker.size)) * self.loop.num_ranks

    def used(self) -> str:
        """Return the name of the weights that make the images now; with a plugin's guidance, "ema with NAME"."""
        samples = self.loop.sample(SampleRequest(0, weights=self.weights))
        usual, used = (each.guidance if each else None for each in (self.loop.sampler, samples.sampler))
        return samples.weights if used is None or used is usual else f"{samples.weights} with {used.use}"

    def images(self, numbers: range) -> Iterator[Tensor]:
        """Yield the images `numbers` in parts, n c h w, float32; all ranks must call this."""

        def request(part: range) -> SampleRequest:
            return SampleRequest(len(part), self.seed, part.start, stream="evaluate", weights=self.weights)

        return self._maker.make(numbers, request)

    def features(self, num: int, what: str) -> Collected:
        """Return the features of the first `num` images, rounded to 8 bits as in a file; each rank makes a share.

        `what` names the images in messages, such as "fid: images".

        Raises:
            ValueError: on all ranks for an image that is not finite.
        """
        start, end = shares(num)[self.loop.rank]
        # As many images on all ranks, because ranks that share one model must call it equally often.
        most = max(last - first for first, last in shares(num))
        features, problems = Collected(), list[Exception]()
        with closing(paced(self.images(range(start, start + most)), most, what)) as parts:
            for part in _first(parts, end - start):
                try:
                    if not problems:
                        features.add(*self.space(_pixels(part, what)))
                except Exception as error:  # raised below, since ranks that share a model must all go on
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
        metadata=about(f'space of the features; default: {_USUAL}, else "{FEATURES_OF_OTHERS}"'),
    )
    seed: int = field(default=0, kw_only=True, validator=ge(0), metadata=about("seed of the noise"))
    weights: str | None = field(
        default=None,
        kw_only=True,
        metadata=about('"model", or the name of an average to sample with; default: an average if any'),
    )
    space: Space = field(init=False)
    generated: Generated = field(init=False)
    _acted_at: int | None = saved(None, key="measured_at", validator=COUNT)
    _is_strangers: bool = field(init=False, factory=is_closed)  # whether the plugin was made without connections

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
        """Raise UserError for a run that cannot be measured, before it starts; the name of the plugin is added."""

    @abstractmethod
    def measure(self, loop: Loop) -> dict[str, float]:
        """Generate images with the current weights, log their metrics, and return these by name.

        Raises:
            ValueError: for an image that is not finite.
        """

    def act(self, loop: Loop) -> None:
        self.measure(loop)


def _first(parts: Iterable[Tensor], num: int) -> Iterator[Tensor]:
    """Yield the first `num` images of `parts`, and let all parts be made."""
    for part in parts:
        yield part[: max(0, num)]
        num -= len(part)


def _pixels(images: Tensor, what: str) -> Tensor:
    if bad := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
        raise ValueError(f"{what}: {bad} of {len(images)} generated images are not finite")
    return to_uint8(images)
