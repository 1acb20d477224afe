"""The request and the result of the hook `sample`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, validators
from torch import Generator, Tensor

from hookdiff.machine.randomness import derive_seed

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed
    from hookdiff.models.objective import Objective
    from hookdiff.models.sampler import MakesImages, Sampler


def _has_a_row_each(request: Any, option: Any, conditions: Mapping[str, Any] | None) -> None:
    for name, column in (conditions or {}).items():
        if len(column) != request.num:
            size = f"shape {tuple(column.shape)}" if isinstance(column, Tensor) else f"{len(column)} rows"
            raise ValueError(f"{option.name!r}: {name!r} has {size}, expected {request.num} rows, one per image")


def _is_one_each(request: Any, _: Any, numbers: Sequence[int] | None) -> None:
    if numbers is not None and len(numbers) != request.num:
        raise ValueError(f"'numbers' has {len(numbers)} numbers, expected {request.num}, one per image")


def with_all_members(sampler: MakesImages | None, objective: Objective | None = None) -> Sampler | None:
    """Return `sampler` with defaults for members that it lacks, if it accepts the `objective`; None remains None."""
    if sampler is None:
        return None
    from hookdiff.models.sampler import as_sampler  # only to make images

    return as_sampler(sampler, objective)


@define(frozen=True)
class SampleRequest:
    """A request for `num` images, numbered from `start`; `seed`, `stream`, number and `size` determine an image."""

    num: int = field(validator=validators.ge(0))  # 0 only checks that the request can be met
    seed: int = 0
    start: int = 0
    # "evaluate" for the images of metrics, which differ from images to look at
    stream: str = "sample"
    weights: str | None = None  # "model", or the name of an average; None: an average if there is one
    size: tuple[int, int] | None = None  # height and width of the pictures; None: the most frequent of the data
    numbers: tuple[int, ...] | None = field(default=None, validator=_is_one_each)  # None: those from `start`
    labels: tuple[int, ...] | None = None  # one per image, -1 is no class; None: see `default_labels`
    # n c h w, standard normal: the noise to start from; None: drawn
    noise: Tensor | None = field(default=None, eq=False)
    # n c h w in [-1, 1]: images to start from; None: pure noise
    images: Tensor | None = field(default=None, eq=False)
    # n 1 h w, bool: the region of `images` to make anew
    mask: Tensor | None = field(default=None, eq=False)
    # with `images`: share of the sampler's steps to run, in (0, 1]; with a mask, 1 is usual
    strength: float = 0.8
    # By name, one row per image; None: from training samples, if the objective needs any (see `rows`).
    conditions: Mapping[str, Tensor] | None = field(default=None, eq=False, validator=_has_a_row_each)
    texts: Mapping[str, Sequence[str]] | None = field(default=None, validator=_has_a_row_each)  # prompts by kind
    negative: Mapping[str, str] | None = None  # texts that guidance leads away from, by name; None: nothing
    raw: bool = False  # return the images without decoding and clamping

    def generators(self) -> list[Generator]:
        """Return one CPU generator for each image: image k is the same in any grid and batch, and on any device."""
        return [Generator().manual_seed(derive_seed(self.seed, self.stream, k)) for k in self._numbers]

    @property
    def _numbers(self) -> Sequence[int]:
        return range(self.start, self.start + self.num) if self.numbers is None else self.numbers

    def default_labels(self, num_classes: int, known: Tensor | None) -> tuple[int, ...]:
        """Return the labels of a request that gives none; the label of image k is the same in any request.

        Images to look at take the classes in turn. Images for metrics ("evaluate") take the labels of random samples of
        the data, if `known` (n, int64) holds them, so that each class is as frequent as in the data.
        """
        if self.stream != "evaluate" or known is None or not len(known):
            return tuple(k % num_classes for k in self._numbers)
        return tuple(int(known[row]) for row in self.rows(len(known)))

    def rows(self, num_samples: int, part: int = 1) -> list[int]:
        """Return the sample (of `num_samples`) that gives each image its conditions: in turn; random for metrics."""
        if self.stream != "evaluate":
            return [k % num_samples for k in self._numbers]
        return [derive_seed(self.seed, self.stream, k, part=part) % num_samples for k in self._numbers]

    def finish(self, samples: Samples, feed: Feed) -> Samples:
        """Return `samples` clamped to [-1, 1] if they are pictures, as `feed` says, unless the request is raw."""
        if self.raw or not self.num or not (feed.codec or feed.are_pictures):
            return samples
        images = samples.images  # NaN and infinities stay, so that they are found
        return evolve(samples, images=images.clamp(-1, 1).where(images.isfinite(), images))


@define(frozen=True, eq=False)
class Samples:
    """Images, and the weights and the sampler that made them."""

    images: Tensor  # n c h w, float32, on the model's device; see `Loop.sample` for their range
    weights: str  # "model" or the name of the average that was used
    # The sampler of these images, perhaps of a plugin; None: not known.
    sampler: Sampler | None = field(default=None, converter=with_all_members)
