from itertools import pairwise
from math import cos, exp, inf, log, pi, sin, sqrt
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from hookdiff.diffusion.clipping import NoClipping
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.prediction import Epsilon, q_sample
from hookdiff.diffusion.process import EDM, IMAGE, VP, Flow, Point
from hookdiff.diffusion.solvers import DDIM, DDPM, DPMSolver2M, Euler, Heun
from hookdiff.diffusion.spacing import Karras
from tests.diffusion.conftest import vp

OBJECTIVES = {True: Diffusion(Flow()), False: Diffusion(VP("linear"))}  # of straight trajectories, and of others
POINTS = VP("linear").at_timesteps(list(range(1000)))
pixels = st.floats(-3, 3)
variances = st.sampled_from(["fixed_small", "fixed_large"])


@st.composite
def moments(draw: st.DrawFn, num: int = 2) -> list[Point]:
    """Draw points of one process, noisiest first, with any alpha and a falling sigma / alpha."""
    falls = sorted(draw(st.lists(st.floats(0.02, 50), min_size=num, max_size=num)), reverse=True)
    assume(all(now > after * 1.01 for now, after in pairwise(falls)))
    alphas = draw(st.lists(st.floats(0.05, 2), min_size=num, max_size=num))
    return [Point(alpha, alpha * ratio) for alpha, ratio in zip(alphas, falls, strict=True)]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def seen(x: Tensor, at: Point, mu: float, s: float) -> tuple[Tensor, Tensor]:
    """Return the x0 and the noise that the best possible network for N(mu, s²) data predicts from x."""
    y = (x - at.alpha * mu) / ((at.alpha * s) ** 2 + at.sigma**2)
    return mu + at.alpha * s**2 * y, at.sigma * y


def approx(expected: Any) -> object:
    return pytest.approx(expected, rel=1e-9)


class Chain:
    """A chain with a network that predicts the given pairs of image and noise, one pair in each call."""

    steps = 10
    clipping = NoClipping()

    def __init__(self, *pairs: tuple[Tensor, Tensor], straight: bool = True, earlier: Any = ()) -> None:
        self.pairs, self.earlier = iter(pairs), earlier
        self.diffusion = OBJECTIVES[straight]

    def predict(self, x: Tensor, at: Point) -> tuple[Tensor, Tensor]:
        return next(self.pairs)

    def noised(self, mean: Tensor, std: float) -> tuple[Tensor, float]:
        return mean, std


def ddim_step(x0: Tensor, noise: Tensor, now: Point, after: Point, eta: float = 0.0) -> Any:
    chain: Any = Chain((x0, noise))
    return DDIM(eta).step(chain, x0, now, after)


def ddpm_step(x: Tensor, x0: Tensor, now: Point, after: Point, variance: Any = "fixed_small") -> Any:
    chain: Any = Chain((x0, x0))
    return DDPM(variance).step(chain, x, now, after)


def heun_step(x: Tensor, first: Any, second: Any, now: Point, after: Point, straight: bool) -> Tensor:
    chain: Any = Chain(first, second, straight=straight)
    return Heun().step(chain, x, now, after)


def dpmpp_2m_step(x: Tensor, x0: Tensor, before: tuple[Tensor, Point] | None, now: Point, after: Point) -> Tensor:
    chain: Any = Chain((x0, x0), earlier=[before] if before else [])
    return DPMSolver2M().step(chain, x, now, after)


# Song et al. 2020


@pytest.mark.parametrize(("num", "expected"), [(10, 0.883485183679), (50, 0.975623943329), (100, 0.98773828221)])
def test_ddim_in_equal_angles(num: int, expected: float) -> None:
    points = [Point(sin(k / num * pi / 2), cos(k / num * pi / 2)) for k in range(num)]
    x = scalar(1)
    for now, after in pairwise([*points, IMAGE]):
        x, std = ddim_step(*seen(x, now, 0, 1), now, after)
        assert std == 0
    assert (float(x), cos(pi / 2 / num) ** num) == approx((expected, expected))


def test_ddim_trace() -> None:
    x, trace = scalar(1), []
    for now, after in pairwise([POINTS[999], POINTS[499], POINTS[0], IMAGE]):
        x, _ = ddim_step(*seen(x, now, 2, 0.5), now, after)
        trace.append(float(x))
    assert trace == pytest.approx([1.50882377334, 2.08017986341, 2.08025177628], rel=1e-9)


def test_ddim_single_step() -> None:
    now, after = POINTS[999], POINTS[499]
    x0, noise = Epsilon().x0_and_noise(scalar(-0.7), scalar(0.25), now.alpha, now.sigma)
    assert (float(x0), float(ddim_step(x0, noise, now, after)[0])) == approx((149.53771088, 41.2485972688))


@pytest.mark.parametrize(("t_prev", "expected"), [(998, 0.141421297995), (979, 0.574284350785)])
def test_ddim_sigma(t_prev: int, expected: float) -> None:
    _, std = ddim_step(scalar(0), scalar(0), POINTS[999], POINTS[t_prev], eta=1)
    assert std == approx(expected)
    assert ddim_step(scalar(0), scalar(0), POINTS[999], POINTS[t_prev], eta=0.5)[1] == approx(std / 2)


@given(moments(), pixels, pixels)
def test_ddim_without_noise_is_eulers_method(points: list[Point], x0: float, noise: float) -> None:
    """The probability flow is d(x / alpha) / d(sigma / alpha) = noise (Song et al. 2020, eq. 14)."""
    now, after = points
    x = now.alpha * x0 + now.sigma * noise
    stepped, std = ddim_step(scalar(x0), scalar(noise), now, after)
    assert std == 0
    assert float(stepped) == pytest.approx(after.alpha * (x / now.alpha + (after.ratio - now.ratio) * noise), abs=1e-9)
    assert float(stepped) == pytest.approx(float(q_sample(scalar(x0), scalar(noise), after.alpha, after.sigma)))


@given(moments(), pixels, pixels)
def test_ddim_with_eta_1_is_ddpm(points: list[Point], x0: float, noise: float) -> None:
    """Song et al. 2020, section 4.1, holds between any two points of any process."""
    now, after = points
    x = now.alpha * x0 + now.sigma * noise
    mean, std = ddim_step(scalar(x0), scalar(noise), now, after, eta=1)
    expected_mean, expected_std = ddpm_step(scalar(x), scalar(x0), now, after)
    # the mean contains the root of a difference of squares, which loses digits
    assert float(mean) == pytest.approx(float(expected_mean), abs=1e-6)
    assert std == approx(expected_std)


@given(moments(), st.floats(0, 1), pixels, pixels)
def test_every_eta_keeps_the_marginals(points: list[Point], eta: float, x0: float, noise: float) -> None:
    """Given x0, x_after has the variance sigma², as if x0 were noised directly."""
    now, after = points
    mean, std = ddim_step(scalar(0), scalar(1), now, after, eta)
    assert float(mean) ** 2 + std**2 == pytest.approx(after.sigma**2, rel=1e-9)
    of_image, _ = ddim_step(scalar(1), scalar(0), now, after, eta)
    assert float(of_image) == after.alpha


# Ho et al. 2020


@pytest.mark.parametrize(("variance", "expected"), [("fixed_small", 0.991067376352), ("fixed_large", 0.9999)])
def test_ddpm_variance(variance: str, expected: float) -> None:
    ends, total = torch.tensor([0.0, 1.0], dtype=torch.float64), 1.0
    for now, after in pairwise([*POINTS[::-1], IMAGE]):
        mean, std = ddpm_step(ends, seen(ends, now, 0, 1)[0], now, after, variance)
        total = float(mean[1] - mean[0]) ** 2 * total + std**2
    assert total == approx(expected)


@given(st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=29).map(lambda betas: [*betas, 0.97]), st.data())
def test_ddpm_steps_are_the_posterior(betas: list[float], data: st.DataObject) -> None:
    """Ho et al. 2020, eq. 7."""
    tables, points = vp(betas).tables, vp(betas).at_timesteps(list(range(len(betas))))
    t = data.draw(st.integers(1, len(betas) - 1))
    coef1, std = ddpm_step(scalar(0), scalar(1), points[t], points[t - 1])
    coef2, large = ddpm_step(scalar(1), scalar(0), points[t], points[t - 1], "fixed_large")
    beta, (before, now) = float(tables.betas[t]), tables.alphas_cumprod[[t - 1, t]].tolist()
    of_image, of_x = sqrt(before) * beta / (1 - now), sqrt(1 - beta) * (1 - before) / (1 - now)
    assert (float(coef1), float(coef2)) == pytest.approx((of_image, of_x), rel=1e-8)
    assert (std**2, large**2) == pytest.approx(((1 - before) / (1 - now) * beta, beta), rel=1e-8)


@given(moments())
def test_ddpm_is_bayes_rule_for_any_process(points: list[Point]) -> None:
    """A step is the posterior of x_after, given x0 and x_now = share * x_after + fresh noise."""
    now, after = points
    share = now.alpha / after.alpha
    fresh = now.sigma**2 - (share * after.sigma) ** 2
    precision = 1 / after.sigma**2 + share**2 / fresh
    of_x, std = ddpm_step(scalar(1), scalar(0), now, after)
    of_image, large = ddpm_step(scalar(0), scalar(1), now, after, "fixed_large")
    assert (std**2, large**2) == pytest.approx((1 / precision, fresh), rel=1e-6)
    assert float(of_x) == pytest.approx(share / fresh / precision, rel=1e-6)
    assert float(of_image) == pytest.approx(after.alpha / after.sigma**2 / precision, rel=1e-6)


# Karras et al. 2022


def test_one_step_of_edm() -> None:
    now, after = Karras().points(EDM(), 18)[:2]
    x = scalar(1)
    end = q_sample(*seen(x, now, 0, 0.5), after.alpha, after.sigma)
    assert float(end) == approx(0.719835752928)
    corrected = heun_step(x, seen(x, now, 0, 0.5), seen(end, after, 0, 0.5), now, after, straight=True)
    assert float(corrected) == approx(0.719838711527)
    exact = sqrt((0.25 + after.sigma**2) / (0.25 + now.sigma**2))
    assert exact == approx(0.719837882643)
    assert abs(float(corrected) - exact) < abs(float(end) - exact)


@given(moments(), pixels, pixels, st.booleans())
def test_heun_is_euler_on_straight_trajectories(points: list[Point], x0: float, noise: float, straight: bool) -> None:
    now, after = points
    both = scalar(x0), scalar(noise)
    x, expected = q_sample(*both, now.alpha, now.sigma), q_sample(*both, after.alpha, after.sigma)
    stepped = heun_step(x, both, both, now, after, straight=straight)
    assert float(stepped) == pytest.approx(float(expected), rel=1e-9, abs=1e-8)


@given(moments(), pixels, pixels, pixels, pixels)
def test_heun_takes_the_mean_of_two_slopes(points: list[Point], x0: float, noise: float, x1: float, n1: float) -> None:
    now, after = points
    x = now.alpha * x0 + now.sigma * noise
    ends = (scalar(x0), scalar(noise)), (scalar(x1), scalar(n1))
    # straight processes: slopes in alpha and sigma
    slopes = [(after.alpha - now.alpha) * a + (after.sigma - now.sigma) * b for a, b in ((x0, noise), (x1, n1))]
    stepped = heun_step(scalar(x), *ends, now, after, straight=True)
    assert float(stepped) == pytest.approx(x + sum(slopes) / 2, abs=1e-9)
    # other processes: slopes of x / alpha in sigma / alpha
    stepped = heun_step(scalar(x), *ends, now, after, straight=False)
    expected = x / now.alpha + (after.ratio - now.ratio) * (noise + n1) / 2
    assert float(stepped) == pytest.approx(after.alpha * expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("churn", "low", "high", "ratio", "expected"),
    [
        (0.0, 0.0, inf, 2.0, 2.0),
        (2.0, 0.0, inf, 2.0, 2.4),  # raised by the factor 1 + 2 / 10
        (40.0, 0.0, inf, 2.0, 2 * sqrt(2)),  # the variance at most doubles
        (2.0, 2.0, 2.0, 2.0, 2.4),
        (2.0, 2.5, inf, 2.0, 2.0),
        (2.0, 0.0, 1.5, 2.0, 2.0),
    ],
)
def test_churn_raises_the_noise(churn: float, low: float, high: float, ratio: float, expected: float) -> None:
    euler = Euler(churn, low, high)
    assert euler.raised(Point(0.5, 0.5 * ratio), 10) == approx(expected)
    assert euler.raised(Point(0.0, 1.0), 10) == inf  # pure noise stays as it is


# Lu et al. 2022


@given(moments(), pixels, pixels)
def test_dpmpp_of_first_order_is_ddim(points: list[Point], x0: float, noise: float) -> None:
    now, after = points
    x = q_sample(scalar(x0), scalar(noise), now.alpha, now.sigma)
    expected, _ = ddim_step(scalar(x0), scalar(noise), now, after)
    assert float(dpmpp_2m_step(x, scalar(x0), None, now, after)) == pytest.approx(float(expected), abs=1e-9)
    # a step after one from pure noise is of first order too
    from_noise = dpmpp_2m_step(x, scalar(x0), (scalar(9.0), Point(0.0, 1.0)), now, after)
    assert float(from_noise) == pytest.approx(float(expected), abs=1e-9)


@given(moments(3), pixels, pixels, pixels)
def test_dpmpp_is_algorithm_2(points: list[Point], x: float, x0: float, before: float) -> None:
    first, now, after = points
    lambdas = [log(point.alpha / point.sigma) for point in points]
    h_before, h = lambdas[1] - lambdas[0], lambdas[2] - lambdas[1]
    r = h_before / h
    d = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * before
    expected = after.sigma / now.sigma * x - after.alpha * (exp(-h) - 1) * d
    stepped = dpmpp_2m_step(scalar(x), scalar(x0), (scalar(before), first), now, after)
    assert float(stepped) == pytest.approx(expected, rel=1e-9, abs=1e-9)


# All


@given(moments(), st.floats(0, 1), variances, pixels, pixels)
def test_last_step_is_the_predicted_image(
    points: list[Point], eta: float, variance: str, image: float, other: float
) -> None:
    before, now = points
    x0, x = scalar(image), scalar(other)
    for mean, std in (ddim_step(x0, x, now, IMAGE, eta), ddpm_step(x, x0, now, IMAGE, variance)):
        assert (mean, std) == (x0, 0)  # exactly, so that a clipped image stays in its range
    assert dpmpp_2m_step(x, x0, (x, before), now, IMAGE) == x0


@given(st.floats(0, 1), variances, pixels, pixels)
def test_first_step_from_pure_noise(eta: float, variance: str, image: float, other: float) -> None:
    """Pure noise holds nothing of the image, so the step makes x from the predicted x0 and noise alone."""
    now, after, x0, x = Point(0.0, 1.0), POINTS[500], scalar(image), scalar(other)
    for mean, std in (ddim_step(x0, x, now, after, eta), ddpm_step(x, x0, now, after, variance)):
        assert mean.isfinite()
        assert 0 <= std <= 1
    mean, std = ddpm_step(x, x0, now, after)
    assert float(mean) == pytest.approx(after.alpha * image, abs=1e-12)
    assert std == pytest.approx(after.sigma)
    expected = after.alpha * image + after.sigma * other
    assert float(dpmpp_2m_step(x, x0, None, now, after)) == pytest.approx(expected, abs=1e-12)
