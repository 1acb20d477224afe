import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff.diffusion.process import VP
from hookdiff.diffusion.schedules import (
    Cosine,
    Linear,
    NoiseSchedule,
    ScaledLinear,
    Schedule,
    Sigmoid,
    rescale_betas_zero_snr,
)
from tests.conftest import refused

LINEAR = VP("linear").tables
COSINE = VP("cosine").tables
ZERO = VP("linear", rescale_betas_zero_snr=True).tables
SCALED = VP("scaled_linear").tables

random_betas = st.lists(st.floats(1e-5, 0.3), min_size=1, max_size=60)


def close(actual: Tensor | float, expected: float) -> bool:
    return float(actual) == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("schedule", "table", "timestep", "expected"),
    [
        ("linear", "alphas_cumprod", 0, 0.9999),
        ("linear", "alphas_cumprod", 499, 0.0785872428818),
        ("linear", "alphas_cumprod", 999, 4.03582976538e-05),
        ("linear", "betas", 500, 0.01005995996),
        ("linear", "sqrt_alphas_cumprod", 999, 0.00635281808757),
        ("linear", "snr", 0, 9999),
        ("linear", "snr", 499, 0.0852899444626),
        ("linear", "snr", 999, 4.03599265117e-05),
        ("linear", "log_snr", 0, 9.21024036698),
        ("linear", "log_snr", 999, -10.1176731833),
        ("scaled_linear", "betas", 0, 0.00085),
        ("scaled_linear", "betas", -1, 0.012),
        ("scaled_linear", "alphas_cumprod", 499, 0.277669650456),
        ("scaled_linear", "alphas_cumprod", 999, 0.00466009851308),
        ("cosine", "betas", 0, 4.1284224822e-05),
        ("cosine", "betas", 499, 0.00314588623048),
        ("cosine", "betas", 998, 0.749999392901),
        ("cosine", "betas", 999, 0.999),
        ("cosine", "alphas_cumprod", 499, 0.493843590441),
        ("cosine", "alphas_cumprod", 999, 2.42876690703e-09),
    ],
)
def test_known_values(schedule: str, table: str, timestep: int, expected: float) -> None:
    known = {"linear": LINEAR, "scaled_linear": SCALED, "cosine": COSINE}
    assert close(getattr(known[schedule], table)[timestep], expected)


def test_linear_as_a_whole() -> None:
    assert torch.equal(LINEAR.betas, torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64))
    assert close(LINEAR.betas.sum(), 10.05)


def test_linear_ends_as_near_to_noise_as_the_paper_says() -> None:
    mean, var = LINEAR.sqrt_alphas_cumprod[-1] * 0.5, 1 - 0.75 * LINEAR.alphas_cumprod[-1]  # of x_T
    kl = (var + mean**2 - 1 - var.log()) / 2  # from N(0, 1), in nats, for an x_0 of mean 0.5 and variance 0.25
    assert float(kl) == pytest.approx(5.04501626e-06, rel=1e-8)  # the paper's number has 9 digits


def test_float32_tables_are_rounded_once() -> None:
    timesteps = torch.arange(1000)
    alpha, sigma, log_snr = LINEAR.rates(timesteps, 1)
    # float32 arithmetic would be off by 1e-4 in the first sigma
    assert torch.equal(alpha, LINEAR.sqrt_alphas_cumprod.float())
    assert torch.equal(sigma, LINEAR.sqrt_one_minus_alphas_cumprod.float())
    assert torch.equal(log_snr, LINEAR.log_snr.float())


def test_sigmoid() -> None:
    betas = Sigmoid().betas(13)  # the sigmoid at -6, -5, ..., 6
    for k, beta in enumerate(betas):
        assert close(beta, 1e-4 + (0.02 - 1e-4) / (1 + math.exp(6 - k)))


@pytest.mark.parametrize("kind", [Linear, ScaledLinear, Sigmoid])
def test_ends_can_be_given(kind: type[Linear]) -> None:
    betas = kind(beta_start=0.001, beta_end=0.03).betas(50)
    rel = 0.08 if kind is Sigmoid else 1e-12  # the sigmoid stays 1/400 of the range from its ends
    assert betas[[0, -1]].tolist() == pytest.approx([0.001, 0.03], rel=rel)
    assert (betas.diff() > 0).all()


def test_cosine_as_a_whole() -> None:
    assert int((COSINE.alphas_cumprod < 0.5).nonzero()[0]) == 496
    assert (COSINE.betas == 0.999).nonzero().flatten().tolist() == [999]
    assert float(Cosine(max_beta=0.9).betas(1000)[-1]) == 0.9
    assert Cosine(offset=0.0).betas(1000)[0] < COSINE.betas[0] / 10  # about (pi / 2T)²
    f_0 = math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    assert f_0 == pytest.approx(0.999844591, abs=5e-10)
    halfway = math.cos((0.5 + 0.008) / 1.008 * math.pi / 2) ** 2
    assert close(COSINE.alphas_cumprod[499], halfway / f_0)


@given(st.integers(2, 3000), st.data())
def test_cosine_telescopes(timesteps: int, data: st.DataObject) -> None:
    def f(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    t = data.draw(st.integers(0, timesteps - 2))  # the last beta is clipped
    assert close(VP("cosine", timesteps).tables.alphas_cumprod[t], f((t + 1) / timesteps) / f(0))


@pytest.mark.parametrize(
    ("table", "timestep", "expected"),
    [
        ("alphas_cumprod", 499, 0.0760287505471),
        ("alphas_cumprod", 998, 4.21326246509e-09),
        ("betas", 500, 0.0102926174264),
        ("betas", 998, 0.75226723115),
    ],
)
def test_rescaled_linear(table: str, timestep: int, expected: float) -> None:
    assert close(getattr(ZERO, table)[timestep], expected)


@pytest.mark.parametrize("betas", [LINEAR.betas, COSINE.betas, SCALED.betas], ids=["linear", "cosine", "scaled"])
def test_rescaled_ends(betas: Tensor) -> None:
    rescaled = rescale_betas_zero_snr(betas)
    remaining = NoiseSchedule(rescaled).alphas_cumprod
    assert remaining[0] == 1 - betas[0]
    assert (remaining[-1], rescaled[-1]) == (0, 1)
    assert (remaining.diff() < 0).all()
    torch.testing.assert_close(rescale_betas_zero_snr(rescaled), rescaled, rtol=0, atol=1e-14)


@given(random_betas.filter(lambda betas: len(betas) > 1))
def test_rescaling_shifts_and_scales_the_square_root(betas: list[float]) -> None:
    before = NoiseSchedule(betas).sqrt_alphas_cumprod
    rescaled = rescale_betas_zero_snr(torch.tensor(betas, dtype=torch.float64))
    after = NoiseSchedule(rescaled)
    assert after.alphas_cumprod[-1] == after.snr[-1] == 0
    assert after.log_snr[-1] == -torch.inf
    assert float(after.sqrt_alphas_cumprod[0]) == pytest.approx(float(before[0]), rel=1e-15)
    share = (before - before[-1]) / (before[0] - before[-1])
    torch.testing.assert_close(after.sqrt_alphas_cumprod / before[0], share, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(rescale_betas_zero_snr(rescaled), rescaled, rtol=1e-8, atol=1e-12)


@given(st.sampled_from(sorted(Schedule.known)), st.integers(1, 3000))
def test_the_image_fades_but_never_vanishes(name: str, timesteps: int) -> None:
    schedule = NoiseSchedule(Schedule.of(name).betas(timesteps))
    remaining = schedule.alphas_cumprod
    assert (remaining.shape, remaining.dtype) == ((timesteps,), torch.float64)
    assert remaining[-1] > 0
    assert remaining[0] < 1
    assert (remaining.diff() < 0).all()
    assert schedule.log_snr.isfinite().all()


@given(random_betas)
def test_tables_of_random_betas_match_the_chain(betas: list[float]) -> None:
    """Follow the chain x_t = sqrt(1 - beta) x_{t-1} + sqrt(beta) noise, one step at a time."""
    schedule, alpha, variance = NoiseSchedule(betas), 1.0, 0.0
    for t, beta in enumerate(betas):
        alpha, variance = alpha * math.sqrt(1 - beta), variance * (1 - beta) + beta
        assert close(schedule.sqrt_alphas_cumprod[t], alpha)
        assert close(schedule.sqrt_one_minus_alphas_cumprod[t], math.sqrt(variance))
        assert close(schedule.snr[t], alpha**2 / variance)
        assert float(schedule.log_snr[t]) == pytest.approx(math.log(alpha**2 / variance), rel=1e-9, abs=1e-9)


def test_rates_have_the_shape_of_a_batch_and_the_device_of_the_timesteps() -> None:
    timesteps = torch.tensor([0, 999, 499])
    for ndim, shape in ((1, (3,)), (4, (3, 1, 1, 1))):
        rates = LINEAR.rates(timesteps, ndim)
        assert [(rate.shape, rate.dtype) for rate in rates] == [(shape, torch.float32)] * 3
        assert torch.equal(rates[2].flatten(), LINEAR.log_snr[timesteps].float())
    assert {rate.device.type for rate in LINEAR.rates(timesteps.to("meta"), 1)} == {"meta"}
    assert {rate.device.type for rate in LINEAR.rates(timesteps, 1)} == {"cpu"}


def test_schedules_can_be_copied_and_pickled() -> None:
    schedule = NoiseSchedule(Cosine().betas(10))
    schedule.rates(torch.tensor([3]), 1)
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert torch.equal(other.snr, schedule.snr)


@pytest.mark.parametrize(
    ("betas", "facts"),
    [
        ([0.5, 1.0, 0.5], [0.5, 1]),
        ([0.5, 1.5], [0.5, 1.5]),
        ([0.0], [0]),
        (torch.tensor([[0.5]]), ["(1, 1)"]),
        ([], ["(0,)"]),
    ],
)
def test_impossible_betas_are_refused(betas: Tensor | list[float], facts: list[object]) -> None:
    with refused(ValueError, "betas", *facts):
        NoiseSchedule(betas)


def test_one_timestep_cannot_be_both_ends() -> None:
    with refused(ValueError, "zero terminal SNR", 2):
        rescale_betas_zero_snr(torch.tensor([0.5]))
