from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookdiff.diffusion import TIMES, Diffusion, Discrete, Flow, Process, VarianceExploding, make_schedule
from hookdiff.diffusion.times import uniforms

EXPLODING, STRAIGHT = VarianceExploding(), Flow()
LINEAR = Discrete(make_schedule("linear", 1000))
fractions = st.floats(1e-6, 1 - 1e-6)
means, stds = st.floats(-2, 2), st.floats(0.1, 2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quantile(name: str, process: Process, fraction: float, mean: float = 0.0, std: float = 1.0) -> float:
    return float(TIMES[name](process, torch.tensor([fraction], dtype=torch.float64), mean, std))


def fraction_below(quantile: Callable[[float], float], value: float) -> float:
    low, high = 1e-7, 1 - 1e-7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if quantile(middle) < value else (low, middle)
    return low


def test_sigmas_of_edm_training() -> None:
    def sigma(fraction: float) -> float:
        return quantile("log_normal", EXPLODING, fraction, -1.2, 1.2)

    assert sigma(0.5) == pytest.approx(0.301194211912, rel=1e-9)
    inside = fraction_below(sigma, 80) - fraction_below(sigma, 0.002)
    assert inside == pytest.approx(0.999983703882, rel=1e-9)
    # The mean, by a rule over normal quantiles. It leans on the far tail, and fractions are kept within float32.
    z = torch.linspace(-5, 8, 2001, dtype=torch.float64)
    sigmas = TIMES["log_normal"](EXPLODING, torch.special.ndtr(z), -1.2, 1.2)
    density = (-z.square() / 2).exp() / (2 * torch.pi) ** 0.5
    assert float(torch.trapezoid(sigmas * density, z)) == pytest.approx(0.618783391806, rel=1e-4)


def test_edm_trains_with_the_distribution_of_its_paper() -> None:
    diffusion = Diffusion(schedule="edm", stratified=True)
    sigmas = diffusion.draw_times(100_000, seeded())
    assert sigmas.dtype == torch.float32
    assert float(sigmas.median()) == pytest.approx(0.301194211912, rel=1e-3)
    assert float(sigmas.mean()) == pytest.approx(0.618783391806, rel=1e-2)
    second = Diffusion(schedule="edm", time_mean=-0.4, time_std=1.0, stratified=True)  # that of EDM2
    assert float(second.draw_times(100_000, seeded()).median()) == pytest.approx(0.670320046036, rel=1e-3)
    assert quantile("log_normal", EXPLODING, 0.5, -0.4) == pytest.approx(0.670320046036, rel=1e-9)


def test_density_of_the_logit_normal_in_the_middle() -> None:
    around = [quantile("logit_normal", STRAIGHT, 0.5 + h) for h in (-1e-4, -5e-5, 5e-5, 1e-4)]
    slope = (around[0] - 8 * around[1] + 8 * around[2] - around[3]) / (12 * 5e-5)  # to fourth order
    assert 1 / slope == pytest.approx(1.59576912161, rel=1e-9)
    assert quantile("logit_normal", STRAIGHT, 0.5) == pytest.approx(0.5, rel=1e-12)


@given(fractions, means, stds)
def test_quantiles(fraction: float, mean: float, std: float) -> None:
    normal = NormalDist(mean, std).inv_cdf(fraction)
    logistic = 1 / (1 + exp(-normal))
    assert quantile("logit_normal", STRAIGHT, fraction, mean, std) == pytest.approx(logistic, rel=1e-6)
    assert quantile("log_normal", EXPLODING, fraction, mean, std) == pytest.approx(exp(normal), rel=1e-6)
    assert quantile("uniform", STRAIGHT, fraction, mean, std) == pytest.approx(fraction, rel=1e-6)
    log_uniform = log(0.002) + (log(80) - log(0.002)) * fraction
    assert log(quantile("uniform", EXPLODING, fraction)) == pytest.approx(log_uniform, rel=1e-6)
    # the same ratio in the flow, where it is t / (1 - t)
    t = quantile("log_normal", STRAIGHT, fraction, mean, std)
    assert log(t / (1 - t)) == pytest.approx(normal, rel=1e-6, abs=1e-6)
    assert int(quantile("uniform", LINEAR, fraction)) == int(fraction * 1000)
    assert abs(int(quantile("logit_normal", LINEAR, fraction, mean, std)) - logistic * 1000) <= 1


@given(means, stds, st.integers(0, 2**32))
def test_drawn_times_follow_the_quantiles(mean: float, std: float, seed: int) -> None:
    """The k-th of many stratified times is the quantile of (k + 1/2) / n, up to a stratum."""
    num = 400
    for schedule, name in (("flow", "logit_normal"), ("edm", "log_normal"), ("flow", "uniform"), ("edm", "uniform")):
        normal = {} if name == "uniform" else {"time_mean": mean, "time_std": std}
        diffusion = Diffusion(schedule=schedule, times=name, stratified=True, **normal)
        times = diffusion.draw_times(num, seeded(seed)).double().sort().values
        edges = torch.arange(num + 1, dtype=torch.float64) / num
        quantiles = TIMES[name](diffusion.process, edges, mean, std)
        assert (quantiles[:-1] <= times * (1 + 1e-5)).all()
        assert (times <= quantiles[1:] * (1 + 1e-5)).all()


@given(st.integers(1, 500), st.integers(0, 2**32))
def test_stratified_numbers_are_one_a_stratum(num: int, seed: int) -> None:
    drawn = uniforms(num, seeded(seed), stratified=True)
    assert drawn.dtype == torch.float32
    assert ((drawn >= 0) & (drawn < 1)).all()
    within = drawn.double().sort().values * num - torch.arange(num)  # its stratum, 0 to 1 up to rounding
    assert ((within > -1e-3) & (within < 1 + 1e-3)).all()


def test_stratified_numbers_are_in_random_order_and_uniform() -> None:
    rows = torch.stack([uniforms(4, seeded(seed), stratified=True) for seed in range(4000)])
    for place in range(4):  # each place alone
        assert rows[:, place].histc(10, 0, 1).tolist() == pytest.approx([400] * 10, abs=90)
    assert float(rows.mean(1).std()) < 0.08  # 0.144 if each were drawn by itself


@given(st.integers(1, 100), st.integers(0, 2**32))
def test_uniform_numbers_are_those_of_torch(num: int, seed: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        drawn = uniforms(num, seeded(seed))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(drawn, torch.rand(num, generator=seeded(seed), dtype=torch.float32))


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_the_ends_of_the_range_give_times_that_can_be_used(schedule: str, name: str) -> None:
    diffusion = Diffusion(schedule=schedule, times=name)
    ends = torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24])
    std = 30.0 if name == "logit_normal" else 3.0  # whose sigmoid is then 1 in float32
    times = TIMES[name](diffusion.process, ends, 0.0, std)
    alpha, sigma, log_snr = diffusion.process.rates(times, 1)
    assert (sigma > 0).all()
    assert (alpha > 0).all()
    assert log_snr.isfinite().all()
    assert (times.diff() >= 0).all()


def test_the_usual_times() -> None:
    def same(one: Tensor, other: Tensor) -> bool:
        return torch.equal(one, other) and one.dtype == other.dtype

    for schedule, name in (("linear", "uniform"), ("flow", "uniform"), ("edm", "log_normal")):
        usual, named = Diffusion(schedule=schedule), Diffusion(schedule=schedule, times=name)
        assert same(usual.draw_times(50, seeded()), named.draw_times(50, seeded()))
    assert Diffusion(times="logit_normal").draw_times(50, seeded()).dtype == torch.int64
