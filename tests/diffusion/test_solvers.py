from itertools import pairwise, product
from math import sqrt
from typing import Any

import attrs
import pytest
import torch
from attrs import define
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hookdiff.diffusion import DDIM, DDPM, VP, Diffusion, DPMSolver2M, Euler, Heun, Sampling, Solver
from hookdiff.diffusion.spacing import karras_sigmas
from tests.conftest import wide
from tests.diffusion.conftest import (
    PAIRS,
    PREDICTIONS,
    PROCESSES,
    euler_for_heun_on_flow,
    generators,
    objectives,
    pointwise,
    solvers,
)

LINEAR = Diffusion("ddpm")
LEVELS = VP("linear").tables.alphas_cumprod.tolist()


def affine_map(sampling: Sampling, net: Any) -> tuple[float, float]:
    """Return the mean and the standard deviation of the samples for noise from N(0, 1).

    A sample is an affine function of its noise, so the samples from the noises 0 and 1 determine both.
    """
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    out = sampling.sample(net, net.diffusion, (1, 1, 1), generators(0, 1), "cpu", torch.float64, noise=ends)
    return float(out[0]), float(out[1] - out[0])


# Gaussian data, for which the best network and the result of each sampler are known


STDS_OF_DDIM = [
    (1000, "trailing", 0.998124293998),
    (1000, "leading", 0.998124293998),
    (100, "trailing", 0.981581786758),
    (50, "trailing", 0.963550983718),
    (50, "leading", 0.964079271455),
    (10, "trailing", 0.829369234813),
]


@pytest.mark.parametrize(
    ("sampler", "prediction", "steps", "spacing", "expected"),
    [
        *(("ddim", "epsilon", *row) for row in STDS_OF_DDIM[:2]),
        *((*pair, *row) for pair in product(("ddim", "euler"), PREDICTIONS) for row in STDS_OF_DDIM[2:]),
    ],
)
def test_ddim_std(gaussian: type, sampler: str, prediction: str, steps: int, spacing: str, expected: float) -> None:
    sampling = Sampling(sampler, steps, spacing, clipping="none")
    _, std = affine_map(sampling, gaussian(Diffusion("ddpm", prediction)))
    assert std == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("steps", "expected"), [(1000, 1.9936663003), (50, 1.99401052914)])
def test_ddim_mean(gaussian: type, steps: int, expected: float) -> None:
    mean, _ = affine_map(Sampling("ddim", steps, clipping="none"), gaussian(LINEAR, mu=2, s=0.5))
    assert mean == pytest.approx(expected, rel=1e-9)


# Steps, and the standard deviations of samples: Euler and Heun for s = 0.5, Euler and Heun for s = 1.
STDS = {
    "edm": (
        (10, 0.365213065063, 0.609798000799, 0.75079986263, 1.17543254599),
        (18, 0.423031436408, 0.527624637001, 0.859455424636, 1.04472883983),
        (256, 0.494445157634, 0.50009542468, 0.989878102251, 1.00009886615),
    ),
    "flow": (
        (1, 0, 0.5, 0, 0.5),
        (2, 0.2, 0.48, 0.5, 0.9375),
        (10, 0.4307826049, 0.5017199122, 0.8789843785, 0.9993349539),
    ),
}


@pytest.mark.parametrize(
    ("process", "prediction"),
    [
        pytest.param(*pair, marks=() if pair[1] in ("edm", "flow_prediction") else pytest.mark.wide)
        for pair in PAIRS
        if pair[0] in STDS
    ],
)
def test_std_of_samples(gaussian: type, process: str, prediction: str) -> None:
    is_flow = process == "flow"
    for steps, *wanted in STDS[process]:
        for (s, sampler), expected in zip(product((0.5, 1), ("euler", "heun")), wanted, strict=True):
            if sampler == "heun" and is_flow and prediction == "sample":
                continue  # at t = 0 the noise cannot be derived, so that the last step is Euler's
            net = gaussian(Diffusion(process, prediction), mu=2 * is_flow, s=s)
            mean, std = affine_map(Sampling(sampler, steps, "trailing" if is_flow else "karras", "none"), net)
            assert std == pytest.approx(expected, rel=1e-9)
            assert not is_flow or mean == pytest.approx(2, rel=1e-9)


def test_order_of_the_edm_samplers(gaussian: type) -> None:
    diffusion = Diffusion("edm")
    for s, exact in ((0.5, 0.499990234661), (1.0, 0.999921884154)):
        assert s * 80 / sqrt(s**2 + 80**2) == pytest.approx(exact, rel=1e-9)  # the factor of the exact ODE, times 80
        for sampler, low, high in (("euler", 3.5, 4.5), ("heun", 15, 19)):
            errors = [
                affine_map(Sampling(sampler, steps, clipping="none"), gaussian(diffusion, s=s))[1] - exact
                for steps in (64, 256)
            ]
            assert low < errors[0] / errors[1] < high


@pytest.mark.parametrize("s", [0.5, *wide(*(1.0, 2.0))])
def test_second_order_on_timesteps(gaussian: type, s: float) -> None:
    """Twice the steps give a quarter of the error against the exact probability flow."""
    first, last = (LEVELS[t] * s**2 + 1 - LEVELS[t] for t in (999, 0))  # variances of x
    exact = s / sqrt(first)
    assert exact == pytest.approx({0.5: 0.500007567353, 1.0: 1.0, 2.0: 1.9998789361}[s], rel=1e-9)
    flow = sqrt(LEVELS[0]) * s**2 / sqrt(last * first)  # the last step, from timestep 0, is of first order
    assert flow == pytest.approx(exact, abs=2e-4)
    for sampler in ("heun", "dpmpp_2m"):
        runs = (Sampling(sampler, steps, "karras", "none") for steps in (100, 200, 400))
        errors = [affine_map(sampling, gaussian(LINEAR, s=s))[1] - flow for sampling in runs]
        assert 3.5 < errors[0] / errors[1] < 4.5
        assert 3.7 < errors[1] / errors[2] < 4.3


@pytest.mark.parametrize("steps", [10, 50])
def test_heun_forgives_an_error_of_the_network_where_the_cosine_schedule_is_steep(gaussian: type, steps: int) -> None:
    """The first step starts where sigma / alpha is 20,000; an error in its slope must not grow as much."""
    net = gaussian(Diffusion(VP("cosine"), "v_prediction"), mu=0.3, s=0.5)
    heun = Sampling("heun", steps, clipping="none")
    mean, std = affine_map(heun, net)
    assert (mean, std) == (pytest.approx(0.3, abs=2e-4), pytest.approx(0.5, abs=0.02))
    inexact = attrs.evolve(net, mu=0.31)
    assert affine_map(heun, Mixed(net.diffusion, net, inexact))[0] == pytest.approx(0.305, abs=0.01)


@define
class Mixed:
    """A network that errs at every other call."""

    diffusion: Diffusion
    one: Any
    other: Any
    calls: int = 0

    def __call__(self, x: Tensor, t: Tensor) -> Any:
        self.calls += 1
        return self.one(x, t) if self.calls % 2 else self.other(x, t)


def test_the_flow_is_exact_in_the_limit(gaussian: type) -> None:
    net = gaussian(Diffusion("flow"), mu=-1, s=0.3)
    mean, std = affine_map(Sampling("heun", 1000, clipping="none"), net)
    assert mean == pytest.approx(-1, rel=1e-9)
    assert std == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize(
    ("sampler", "spacing"),
    [
        (DDPM(), "trailing"),
        *wide((DDPM("fixed_large"), "trailing")),
        *wide((DDIM(eta=1.0), "trailing")),
        (Heun(churn=100.0, churn_max=50.0), "karras"),
    ],
)
def test_samples_with_fresh_noise_are_like_the_data(gaussian: type, sampler: Solver, spacing: str) -> None:
    sampling = Sampling(sampler, 600, spacing, "none")
    images = sampling.sample(gaussian(LINEAR, 2, 0.5), LINEAR, (1, 64, 64), generators(0, 1), "cpu")
    assert float(images.mean()) == pytest.approx(2, abs=0.03)
    assert float(images.std()) == pytest.approx(0.5, abs=0.02)


# Properties of all samplers


@given(objectives(), solvers, st.integers(1, 20), st.booleans(), st.floats(-1, 1))
@settings(max_examples=60)
def test_constant_data_is_recovered(
    gaussian: type, diffusion: Diffusion, sampler: Solver, steps: int, clip: bool, constant: float
) -> None:
    """The trajectories are straight lines, so every step of every sampler stays on its line."""
    sampling = Sampling(euler_for_heun_on_flow(sampler, diffusion), steps, clipping="clamp" if clip else "none")
    net = gaussian(diffusion, constant, s=0)
    images = sampling.sample(net, diffusion, (1, 2, 2), generators(0, 1), "cpu", torch.float64)
    torch.testing.assert_close(images, torch.full_like(images, constant), rtol=0, atol=1e-8)


def sampled(net: Any, diffusion: Diffusion, sampler: Solver, steps: int, clip: bool) -> Tensor:
    sampling = Sampling(sampler, steps, clipping="clamp" if clip else "none")
    return sampling.sample(net, diffusion, (1, 3, 3), generators(0, 1), "cpu", torch.float64)


@given(objectives(), st.integers(1, 12), st.booleans())
def test_ddim_is_euler(diffusion: Diffusion, steps: int, clip: bool) -> None:
    one, other = (sampled(pointwise, diffusion, each, steps, clip) for each in (DDIM(), Euler()))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(objectives())
def test_two_steps_of_dpmpp_equal_two_steps_of_ddim(diffusion: Diffusion) -> None:
    """The first step has no step before it and the last ends at the image, so both are of first order."""
    one, other = (sampled(pointwise, diffusion, each, 2, clip=False) for each in (DDIM(), DPMSolver2M()))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(solvers.filter(lambda sampler: isinstance(sampler, DDIM | DDPM)), st.booleans())
def test_ddim_and_ddpm_equal_a_few_lines_of_torch(sampler: DDIM | DDPM, clip: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 4, 4, generator=generator)
    for a, a_next in pairwise([LEVELS[999], LEVELS[666], LEVELS[332], 1.0]):
        x0 = (x - sqrt(1 - a) * 0.9 * x) / sqrt(a)
        x0 = x0.clamp(-1, 1) if clip else x0
        noise = (x - sqrt(a) * x0) / sqrt(1 - a)
        beta = 1 - a / a_next
        small = beta * (1 - a_next) / (1 - a)
        if isinstance(sampler, DDIM):
            variance = small * sampler.eta**2
            mean = sqrt(a_next) * x0 + sqrt(max(0.0, 1 - a_next - variance)) * noise
        else:
            mean = sqrt(a_next) * beta / (1 - a) * x0 + sqrt(1 - beta) * (1 - a_next) / (1 - a) * x
            variance = small if sampler.variance == "fixed_small" or a_next == 1 else beta
        x = mean + sqrt(variance) * torch.randn(1, 4, 4, generator=generator)
    sampling = Sampling(sampler, 3, clipping="clamp" if clip else "none")
    images = sampling.sample(lambda x, t: 0.9 * x, LINEAR, (1, 4, 4), generators(5), "cpu")
    torch.testing.assert_close(images[0], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Euler, Heun])
@given(st.floats(0.1, 30), st.floats(0, 1), st.floats(2, 100), st.floats(0.9, 1.1))
def test_churn_is_algorithm_2(kind: type[Heun], churn: float, low: float, high: float, std: float) -> None:
    """Compare with algorithm 2 of Karras et al. 2022, with `pointwise` as the denoiser D."""
    diffusion, steps = Diffusion("edm", "sample"), 5

    def denoised(x: Tensor, sigma: float) -> Tensor:
        return pointwise(x, torch.tensor([sigma]).double().log() * 250)

    generator = torch.Generator().manual_seed(5)
    sigmas = [*karras_sigmas(steps, 0.002, 80.0), 0.0]
    x = torch.randn(1, 1, 4, 4, generator=generator).double() * 80
    for t, t_next in pairwise(sigmas):
        gamma = min(churn / steps, sqrt(2) - 1) if low <= t <= high else 0
        if gamma:
            fresh = torch.randn(1, 1, 4, 4, generator=generator).double()
            x = x + sqrt((t + gamma * t) ** 2 - t**2) * std * fresh
            t += gamma * t
        slope = (x - denoised(x, t)) / t
        end = x + (t_next - t) * slope
        if t_next and kind is Heun:
            slope = (slope + (end - denoised(end, t_next)) / t_next) / 2
        x = x + (t_next - t) * slope
    sampling = Sampling(kind(churn, low, high, std), steps)
    images = sampling.sample(pointwise, diffusion, (1, 4, 4), generators(5), "cpu", torch.float64)
    torch.testing.assert_close(images, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "process",
    [pytest.param(name, marks=() if name in ("cosine", "flow", "edm") else pytest.mark.wide) for name in PROCESSES],
)
@pytest.mark.parametrize("sampler", Solver.known)
def test_samples_from_pure_noise_are_finite(process: str, sampler: str) -> None:
    chosen = PROCESSES[process] if process in ("flow", "edm") else VP(process, rescale_betas_zero_snr=True)
    for prediction in PREDICTIONS[1:]:
        for clipping in ("none", "clamp", "dynamic"):
            sampling = Sampling(sampler, 5, clipping=clipping)
            images = sampling.sample(pointwise, Diffusion(chosen, prediction), (1, 3, 3), generators(0, 1), "cpu")
            assert images.isfinite().all()
            assert clipping == "none" or images.abs().max() <= 1
