from math import exp, log
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff.diffusion import EDM, VP, Diffusion, Flow, LogitNormal, LogNormal, Process, Times, UniformTimes
from tests.conftest import refused
from tests.diffusion.conftest import seeded

EXPLODING, STRAIGHT, LINEAR = EDM(), Flow(), VP("linear")
fractions = st.floats(1e-6, 1 - 1e-6)
means, stds = st.floats(-2, 2), st.floats(0.1, 2)


class Fractions(UniformTimes):
    """Times that equal the drawn fractions."""

    def at(self, process: Process, fraction: Tensor) -> Tensor:
        return fraction


def uniforms(num: int, seed: int, stratified: bool = False) -> Tensor:
    return Fractions(stratified=stratified).draw(LINEAR, num, seeded(seed))


def drawn(diffusion: Diffusion, num: int) -> Tensor:
    return diffusion.times.draw(diffusion.process, num, seeded())


def quantile(times: Times, process: Process, fraction: float) -> float:
    return float(times.at(process, torch.tensor([fraction], dtype=torch.float64)))


def test_quantiles_of_the_defaults() -> None:
    assert quantile(LogitNormal(), STRAIGHT, 0.5) == pytest.approx(0.377540668798, rel=1e-9)  # 1 / (1 + exp(0.5))
    assert quantile(LogitNormal(), STRAIGHT, NormalDist().cdf(1)) == pytest.approx(1 / (1 + exp(-0.5)), rel=1e-6)
    assert quantile(LogNormal(), EXPLODING, 0.5) == pytest.approx(0.301194211912, rel=1e-9)  # exp(-1.2)
    assert quantile(LogNormal(), EXPLODING, NormalDist().cdf(1)) == pytest.approx(1, rel=1e-9)


@given(fractions, means, stds)
def test_quantiles(fraction: float, mean: float, std: float) -> None:
    normal = NormalDist(mean, std).inv_cdf(fraction)
    logistic = 1 / (1 + exp(-normal))
    assert quantile(LogitNormal(mean, std), STRAIGHT, fraction) == pytest.approx(logistic, rel=1e-6)
    assert quantile(LogNormal(mean, std), EXPLODING, fraction) == pytest.approx(exp(normal), rel=1e-6)
    assert quantile(UniformTimes(), STRAIGHT, fraction) == pytest.approx(fraction, rel=1e-6)
    log_uniform = log(0.002) + (log(80) - log(0.002)) * fraction
    assert log(quantile(UniformTimes(), EXPLODING, fraction)) == pytest.approx(log_uniform, rel=1e-6)
    # a flow gets the same ratio, t / (1 - t)
    t = quantile(LogNormal(mean, std), STRAIGHT, fraction)
    assert log(t / (1 - t)) == pytest.approx(normal, rel=1e-6, abs=1e-6)
    assert int(quantile(UniformTimes(), LINEAR, fraction)) == int(fraction * 1000)
    assert abs(int(quantile(LogitNormal(mean, std), LINEAR, fraction)) - logistic * 1000) <= 1


@given(means, stds, st.integers(0, 2**32))
def test_drawn_times_follow_the_quantiles(mean: float, std: float, seed: int) -> None:
    """The k-th of n sorted, stratified times lies between the quantiles of k / n and (k + 1) / n."""
    num = 400
    normal, uniform = {"mean": mean, "std": std, "stratified": True}, UniformTimes(stratified=True)
    pairs = [(STRAIGHT, LogitNormal(**normal)), (EXPLODING, LogNormal(**normal))]
    for process, chosen in (*pairs, (STRAIGHT, uniform), (EXPLODING, uniform)):
        times = chosen.draw(process, num, seeded(seed)).double().sort().values
        quantiles = chosen.at(process, torch.arange(num + 1, dtype=torch.float64) / num)
        assert (quantiles[:-1] <= times * (1 + 1e-5)).all()
        assert (times <= quantiles[1:] * (1 + 1e-5)).all()


@given(st.integers(1, 500), st.integers(0, 2**32))
def test_each_stratum_gets_one_number(num: int, seed: int) -> None:
    drawn = uniforms(num, seed, stratified=True)
    assert drawn.dtype == torch.float32
    assert ((drawn >= 0) & (drawn < 1)).all()
    # the place within the stratum, 0 to 1 up to rounding
    within = drawn.double().sort().values * num - torch.arange(num)
    assert ((within > -1e-3) & (within < 1 + 1e-3)).all()


def test_stratified_numbers_are_in_random_order_and_uniform() -> None:
    rows = torch.stack([uniforms(4, seed, stratified=True) for seed in range(4000)])
    for place in range(4):  # each place is uniform by itself
        assert rows[:, place].histc(10, 0, 1).tolist() == pytest.approx([400] * 10, abs=90)
    assert float(rows.mean(1).std()) < 0.08  # independent draws would give 0.144


@given(st.integers(1, 100), st.integers(0, 2**32))
def test_uniform_numbers_equal_torch_rand(num: int, seed: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        drawn = uniforms(num, seed)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(drawn, torch.rand(num, generator=seeded(seed), dtype=torch.float32))


@pytest.mark.parametrize("chosen", [UniformTimes(), LogitNormal(0.0, 30.0), LogNormal(0.0, 3.0)], ids=str)
@pytest.mark.parametrize("process", [LINEAR, STRAIGHT, EXPLODING], ids=str)
def test_the_ends_of_the_range_give_times_that_can_be_used(process: Process, chosen: Times) -> None:
    ends = torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24])  # with std = 30 the sigmoid rounds to 1 in float32
    times = chosen.at(process, ends)
    alpha, sigma, log_snr = process.rates(times, 1)
    assert (sigma > 0).all()
    assert (alpha > 0).all()
    assert log_snr.isfinite().all()
    assert (times.diff() >= 0).all()


@pytest.mark.parametrize("process", [VP("linear", rescale_betas_zero_snr=True), VP("cosine", 20, True)], ids=str)
def test_log_normal_times_never_reach_a_zero_terminal_snr(process: VP) -> None:
    with refused(ValueError, "'times'", "'log_normal'", "rescale_betas_zero_snr", "'uniform'", "'logit_normal'"):
        Diffusion(process, "sample", times="log_normal")
    for name in ("uniform", "logit_normal"):
        times = drawn(Diffusion(process, "sample", times=name), 4000)
        assert int(times.min()) < process.timesteps * 0.1
        assert int(times.max()) > process.timesteps * 0.9
    assert drawn(Diffusion("flow", times="log_normal"), 9).isfinite().all()  # a flow has no last timestep
