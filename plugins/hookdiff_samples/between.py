"""Images between two noises, two classes, and two prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve
from torch import Tensor

from hookdiff import SampleRequest, UserError
from hookdiff.diffusion import Ask, Chain, Diffusion, Given, Guidance, Point, Sampling, Solver
from hookdiff.models import conditions_of_samples
from hookdiff.terminal import paced

if TYPE_CHECKING:
    from hookdiff.experiment import Run


def noise_between(shape: Sequence[int], seed: int, rows: int, num: int) -> Tensor:
    """Return `rows` times `num` noises of `shape`; each row goes from one random noise to another.

    The noises of a row are cos(a) z0 + sin(a) z1 for angles a from 0 to pi / 2, so each noise has the variance 1.
    """
    generators = SampleRequest(2 * rows, seed).generators()
    ends = torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
    angles = torch.linspace(0, math.pi / 2, num).view(-1, *[1] * len(shape))
    return torch.cat([angles.cos() * ends[k] + angles.sin() * ends[k + 1] for k in range(0, 2 * rows, 2)])


@define(frozen=True)
class _Blend(Guidance):
    """Returns (1 - share) a + share b: a is the guided output for the images' conditions, b the one for `other`.

    The output is linear in the score, so this is the score of p(x|a)^(1 - share) p(x|b)^share up to a constant factor.
    """

    guidance: Guidance
    other: Given
    share: float

    def output(self, ask: Ask, x: Tensor, at: Point, given: Given) -> Tensor:
        rows = {name: value.to(given[name]).expand_as(given[name]) for name, value in self.other.items()}
        if self.share in (0, 1):
            return self.guidance.output(ask, x, at, {**given, **rows} if self.share else given)
        first, second = (self.guidance.output(ask, x, at, conditions) for conditions in (given, {**given, **rows}))
        return torch.lerp(first, second, self.share)


@define(eq=False)
class Towards(Solver):
    """Makes the steps of `solver` for images with conditions between their own (`share` 0) and `other` (`share` 1).

    `other` has the label or the conditions of one image. The guidance is replaced in a step, because plugins such as
    `autoguidance` may set the guidance of a chain before its first step.
    """

    solver: Solver
    other: Given
    share: float

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        if not isinstance(chain.guidance, _Blend):
            chain.guidance = _Blend(chain.guidance, self.other, self.share)
        return self.solver.step(chain, x, start, end)


def between_noises(
    run: Run, labels: Sequence[int] | None, asked: Mapping[str, Any], seed: int, rows: int, num: int
) -> Iterator[Tensor]:
    """Yield `rows` strips of `num` images in parts; see `noise_between`. `labels` has the class of each strip.

    `asked` has the prompts, which the strips use in turn, the size, and further arguments of `Run.batches`.
    """
    options: dict[str, Any] = {**asked, "labels": labels and [label for label in labels for _ in range(num)]}
    objective, shape = run.loop.objective, run.loop.feed.input_shape(run.height_and_width(asked.get("size")))
    if prompts := asked.get("prompts"):
        options["prompts"] = [text for text in islice(cycle(prompts), rows) for _ in range(num)]
    elif objective.condition_names:  # all images of a strip get the conditions of one example

        def choose(known: int) -> list[int]:
            return [k // num % known for k in range(rows * num)]

        conditions = conditions_of_samples(objective, run.loop.feed, choose, shape)
        known_labels = conditions.pop("labels", None)
        numbers = None if known_labels is None else known_labels.tolist()
        options |= {"conditions": conditions, "labels": options["labels"] or numbers}
    noise = noise_between(shape, seed, rows, num)
    yield from paced(run.batches(rows * num, seed=seed, noise=noise, **options), rows * num, "images")


def between_classes(run: Run, ends: Sequence[int]) -> Given:
    """Return the second of two classes, for the argument `other` of `between`."""
    return {"labels": torch.tensor([ends[1]])}


def between_prompts(run: Run, ends: Sequence[str]) -> Given:
    """Return the second of two prompts, for the argument `other` of `between`.

    Raises:
        UserError: for a network without captions.
    """
    texts = run.loop.feed.reader.texts
    if texts is None or not texts.encoders:
        raise UserError("--prompt: the network was trained without captions; leave it out")
    conditions = texts.embed({kind: [ends[1]] for kind in texts.kinds})
    return {name: rows for name, rows in conditions.items() if name in run.loop.objective.condition_names}


def between(run: Run, other: Given, first: Mapping[str, Any], seed: int, rows: int, num: int) -> Iterator[Tensor]:
    """Yield `rows` strips of `num` images from the label or prompt in `first` to `other`, in one part.

    A strip has the noise of one image.

    Raises:
        UserError: if the sampler is not hookdiff's.
    """
    if not (isinstance(run.loop.sampler, Sampling) and isinstance(run.loop.objective, Diffusion)):
        raise UserError("--interpolate: give one class or prompt; two need hookdiff's own Sampling")
    fitted = run.loop.sampler.fit(run.loop.objective)
    solver = fitted.sampler
    assert solver is not None

    def images_at(share: float) -> Tensor:
        with run.loop.using(sampler=evolve(fitted, sampler=Towards(solver, other, share))):
            return torch.cat(list(run.batches(rows, seed=seed, **first)))

    frames = paced(map(images_at, torch.linspace(0, 1, num).tolist()), rows * num, "images")
    yield torch.stack(list(frames), 1).flatten(0, 1)
