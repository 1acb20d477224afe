"""Test the promise of samplers: it holds for those of the core, and fails for each that breaks it."""

import math
from functools import partial
from typing import ClassVar

import pytest
from attrs import define
from torch import Tensor

from hookdiff.authors import gaussian_flow, gaussian_prediction
from hookdiff.diffusion import DDIM, DDPM, Chain, DPMSolver2M, Euler, Heun, Point, Solver
from hookdiff.testing import assert_converges
from tests.conftest import refused


@pytest.mark.parametrize(
    ("solver", "order"),
    [(DDIM(), 1), (Euler(), 1), (Heun(), 2), (DPMSolver2M(), 2), (DDPM(), None), (Euler(churn=20.0), None)],
    ids=str,
)
def test_the_samplers_of_the_core_keep_the_promise(solver: Solver, order: int | None) -> None:
    assert_converges(solver, order)


@define(frozen=True)
class Loud(DDPM):
    """Adds more noise than it may."""

    factor: ClassVar[float] = 1.05

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        x0, _ = chain.predict(x, start)
        moved = super().step(chain, x, start, end)
        return moved + (self.factor - 1) * (moved - end.alpha * x0)


@define(frozen=True)
class Biased(DDIM):
    """Moves all images a little."""

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        return super().step(chain, x, start, end) + 1e-4


@define(frozen=True)
class WrongEnd(Heun):
    """Changes the image in the last step, which the order does not show."""

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        return super().step(chain, x, start, end) + (0.0 if end.sigma else 0.1)


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        (partial(assert_converges, Euler(), 2), ("Euler", "'flow'", "steps^-0.99", "steps^-2", 16, 128)),
        (partial(assert_converges, Heun(), 3), ("Heun", "'flow'", "steps^-3")),
        (partial(assert_converges, Biased(), 1), ("Biased", "steps^-1")),
        (partial(assert_converges, WrongEnd(), 2), ("WrongEnd", "mean 0.400", 0.3)),
        (partial(assert_converges, Loud()), ("Loud", "deviation", 0.5)),
        (partial(assert_converges, Biased()), ("Biased", "mean", 0.3)),
    ],
)
def test_a_sampler_that_breaks_it_is_refused(check: partial[None], facts: tuple[object, ...]) -> None:
    with refused(AssertionError, *facts):
        check()


def test_the_flow_of_a_gaussian_solves_its_equation() -> None:
    """In s = sigma / alpha, x / alpha changes by the predicted noise (Karras et al. 2022, eq. 1)."""
    y, ratio, step = 1.3, 2.0, 1e-5
    ends = [gaussian_flow(y, (1.0, ratio), (1.0, ratio + by), 0.3, 0.5) for by in (-step, step)]
    slope = (ends[1] - ends[0]) / (2 * step)
    assert math.isclose(slope, gaussian_prediction(y, 1.0, ratio, 0.3, 0.5)[1], rel_tol=1e-8)
