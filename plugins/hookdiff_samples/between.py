"""Images between two noises, and between two classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve
from torch import Tensor

from hookdiff import SampleRequest, UserError
from hookdiff.diffusion import Ask, Chain, Given, Guidance, Point, Sampling, Solver
from hookdiff.terminal import paced

if TYPE_CHECKING:
    from hookdiff.experiment import Run


def noise_between(shape: Sequence[int], seed: int, rows: int, num: int) -> Tensor:
    """Return `rows` times `num` noises of `shape`: each row leads from the noise of one image to that of the next.

    It is cos(a) z0 + sin(a) z1 for angles a from 0 to pi / 2, so that the noise has the variance 1 at each of them.
    """
    ends = torch.stack([torch.randn(*shape, generator=one) for one in SampleRequest(2 * rows, seed).generators()])
    angles = torch.linspace(0, math.pi / 2, num).view(-1, *[1] * len(shape))
    return torch.cat([angles.cos() * ends[k] + angles.sin() * ends[k + 1] for k in range(0, 2 * rows, 2)])


@define(frozen=True)
class _Blend(Guidance):
    """(1 - share) a + share b, for the outputs a with the labels of the images and b with `label`, each guided.

    As an output is linear in the score, this is the score of p(x|a)^(1 - share) p(x|b)^share, up to its constant.
    """

    guidance: Guidance
    label: int
    share: float

    def output(self, ask: Ask, x: Tensor, at: Point, given: Given) -> Tensor:
        other = {**given, "labels": torch.full_like(given["labels"], self.label)}
        if self.share in (0, 1):
            return self.guidance.output(ask, x, at, other if self.share else given)
        first, second = (self.guidance.output(ask, x, at, one) for one in (given, other))
        return torch.lerp(first, second, self.share)


@define(eq=False)
class TowardsClass(Solver):
    """Makes the steps of `solver`, for images that are a `share` of the way from their class to the class `label`.

    It is a solver, since plugins such as `autoguidance` may replace the guidance of a chain before it starts.
    """

    solver: Solver
    label: int
    share: float

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        if not isinstance(chain.guidance, _Blend):
            chain.guidance = _Blend(chain.guidance, self.label, self.share)
        return self.solver.step(chain, x, start, end)


def between_noises(run: Run, labels: Sequence[int] | None, seed: int, rows: int, num: int) -> Iterator[Tensor]:
    """Yield `rows` strips of `num` images in parts; see `noise_between`. `labels` are those of the strips."""
    options: dict[str, Any] = {"labels": labels and [label for label in labels for _ in range(num)]}
    objective: Any = run.loop.objective
    if getattr(objective, "conditions", ()):  # of the examples, the same ones for all images of a strip
        given = objective.given(run.loop.feed.examples(lambda known: [k // num % known for k in range(rows * num)]))
        own = given.pop("labels", None)
        options |= {"conditions": given, "labels": options["labels"] or (None if own is None else own.tolist())}
    noise = noise_between(run.loop.feed.shape, seed, rows, num)
    yield from paced(run.batches(rows * num, seed=seed, noise=noise, **options), rows * num, "images")


def between_classes(run: Run, ends: Sequence[int], seed: int, rows: int, num: int) -> Iterator[Tensor]:
    """Yield `rows` strips of `num` images from one class to another, in one part; a strip has the noise of one image.

    Raises:
        UserError: if the sampler is not hookdiff's.
    """
    if not isinstance(run.loop.sampler, Sampling):
        raise UserError("--interpolate between classes is for hookdiff's own Sampling")
    objective: Any = run.loop.objective
    fitted = run.loop.sampler.fit(objective)
    solver = fitted.sampler
    assert solver is not None

    def made(share: float) -> Tensor:
        towards = TowardsClass(solver, ends[1], share)
        with run.loop.using(sampler=evolve(fitted, sampler=towards)):
            return torch.cat(list(run.batches(rows, labels=ends[:1], seed=seed)))

    frames = paced(map(made, torch.linspace(0, 1, num).tolist()), rows * num, "images")
    yield torch.stack(list(frames), 1).flatten(0, 1)
