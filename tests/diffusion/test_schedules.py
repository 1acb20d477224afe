from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookdiff.diffusion import SCHEDULES, NoiseSchedule, cosine_betas, linear_betas, make_schedule

LINEAR = make_schedule("linear", 1000)
COSINE = make_schedule("cosine", 1000)


def close(actual: Tensor | float, expected: float) -> bool:
    return float(actual) == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("table", "timestep", "expected"),
    [
        ("alphas_cumprod", 0, 0.9999),
        ("alphas_cumprod", 1, 0.999780092072),
        ("alphas_cumprod", 99, 0.897018145675),
        ("alphas_cumprod", 249, 0.524085373825),
        ("alphas_cumprod", 499, 0.0785872428818),
        ("alphas_cumprod", 749, 0.00335055043894),
        ("alphas_cumprod", 999, 4.03582976538e-05),
        ("betas", 500, 0.01005995996),
        ("sqrt_alphas_cumprod", 999, 0.00635281808757),
        ("snr", 0, 9999),
        ("snr", 499, 0.0852899444626),
        ("snr", 999, 4.03599265117e-05),
        ("log_snr", 0, 9.21024036698),
        ("log_snr", 999, -10.1176731833),
        ("posterior_variance", 1, 5.4531876613e-05),
        ("posterior_variance", 500, 0.0100513357789),
        ("posterior_variance", 999, 0.0199999835266),
        ("posterior_mean_coef1", 0, 1),
        ("posterior_mean_coef1", 1, 0.54529149951),
        ("posterior_mean_coef1", 500, 0.00305805707563),
        ("posterior_mean_coef1", 999, 0.000128351487172),
        ("posterior_mean_coef2", 1, 0.454708498991),
        ("posterior_mean_coef2", 500, 0.994104350757),
        ("posterior_mean_coef2", 999, 0.989948678268),
    ],
)
def test_linear(table: str, timestep: int, expected: float) -> None:
    assert close(getattr(LINEAR, table)[timestep], expected)


def test_linear_as_a_whole() -> None:
    assert close(LINEAR.betas.sum(), 10.05)
    assert int((LINEAR.snr < 1).nonzero()[0]) == 259
    assert LINEAR.posterior_variance[0] == 0
    assert LINEAR.posterior_mean_coef2[0] == 0
    sigma = ((1 - LINEAR.alphas_cumprod) / LINEAR.alphas_cumprod).sqrt()
    assert close(sigma[0], 0.0100005000375)
    assert close(sigma[499], 3.42413661904)
    assert close(sigma[999], 157.40728081)


def test_linear_ends_as_near_to_noise_as_the_paper_says() -> None:
    mean, var = LINEAR.sqrt_alphas_cumprod[-1] * 0.5, 1 - 0.75 * LINEAR.alphas_cumprod[-1]  # of x_T
    kl = (var + mean**2 - 1 - var.log()) / 2  # to N(0, 1), in nats, for x_0 of mean 0.5 and variance 0.25
    assert float(kl) == pytest.approx(5.04501626e-06, rel=1e-8)


def test_linear_keeps_its_ends_for_any_number_of_timesteps() -> None:
    betas = linear_betas(10)
    assert betas[0] == 1e-4
    assert betas[-1] == 0.02


@pytest.mark.parametrize(
    ("table", "timestep", "expected"),
    [
        ("betas", 0, 4.1284224822e-05),
        ("betas", 499, 0.00314588623048),
        ("betas", 998, 0.749999392901),
        ("betas", 999, 0.999),
        ("alphas_cumprod", 0, 0.999958715775),
        ("alphas_cumprod", 99, 0.972092737114),
        ("alphas_cumprod", 249, 0.847012161327),
        ("alphas_cumprod", 499, 0.493843590441),
        ("alphas_cumprod", 749, 0.144272102386),
        ("alphas_cumprod", 899, 0.0240917241401),
        ("alphas_cumprod", 998, 2.42876690703e-06),
        ("alphas_cumprod", 999, 2.42876690703e-09),
    ],
)
def test_cosine(table: str, timestep: int, expected: float) -> None:
    assert close(getattr(COSINE, table)[timestep], expected)


def test_cosine_as_a_whole() -> None:
    assert int((COSINE.alphas_cumprod < 0.5).nonzero()[0]) == 496
    assert (cosine_betas(1000) == 0.999).nonzero().flatten().tolist() == [999]
    assert cosine_betas(1000, max_beta=1.0)[-1] == 1


@given(st.integers(2, 3000), st.data())
@settings(max_examples=50, deadline=None)
def test_cosine_telescopes(timesteps: int, data: st.DataObject) -> None:
    def f(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    t = data.draw(st.integers(0, timesteps - 2))  # the last beta is clipped
    assert close(make_schedule("cosine", timesteps).alphas_cumprod[t], f((t + 1) / timesteps) / f(0))


def test_built_from_the_betas_of_stable_diffusion() -> None:
    schedule = NoiseSchedule(torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2)
    assert close(schedule.alphas_cumprod[499], 0.277669650456)
    assert close(schedule.alphas_cumprod[999], 0.00466009851308)
    assert close(schedule.sqrt_alphas_cumprod[999], 0.0682649142172)
    assert close(schedule.snr[999], 0.00468191670616)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 3000))
@settings(max_examples=50, deadline=None)
def test_the_image_fades_and_never_quite(name: str, timesteps: int) -> None:
    schedule = make_schedule(name, timesteps)
    remaining = schedule.alphas_cumprod
    assert remaining.shape == (timesteps,)
    assert remaining.dtype == torch.float64
    assert remaining[-1] > 0
    assert remaining[0] < 1
    assert (remaining.diff() < 0).all()
    assert torch.equal(schedule.alphas_cumprod_prev[1:], remaining[:-1])
    assert schedule.alphas_cumprod_prev[0] == 1
    assert schedule.log_snr.isfinite().all()


def test_gather() -> None:
    timesteps = torch.tensor([0, 999, 499])
    values = LINEAR.gather(("sqrt_one_minus_alphas_cumprod",), timesteps, ndim=4)[0]
    assert values.shape == (3, 1, 1, 1)
    assert values.dtype == torch.float32
    # computed in float64 and rounded once: float32 arithmetic would be off by 1e-4 in the first of these
    assert torch.equal(values.flatten(), LINEAR.sqrt_one_minus_alphas_cumprod[timesteps].float())
    assert LINEAR.gather(("log_snr",), timesteps)[0].shape == (3,)


def test_gather_reads_on_the_device_of_the_timesteps() -> None:
    values = LINEAR.gather(("snr",), torch.zeros(3, dtype=torch.int64, device="meta"))[0]
    assert values.device.type == "meta"
    assert LINEAR.gather(("snr",), torch.zeros(3, dtype=torch.int64))[0].tolist() == [9999] * 3


def test_copies_and_pickles() -> None:
    schedule = make_schedule("cosine", 10)
    schedule.gather(("snr",), torch.tensor([3]))
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert torch.equal(other.snr, schedule.snr)


def test_bad_schedules_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"'sigmoid'; known: linear, cosine"):
        make_schedule("sigmoid", 1000)
    with pytest.raises(ValueError, match="at least 1 timestep, got 0"):
        make_schedule("linear", 0)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 0\.5 to 1"):
        NoiseSchedule([0.5, 1.0])
    with pytest.raises(ValueError, match=r"shape \(1, 1\)"):
        NoiseSchedule(torch.tensor([[0.5]]))
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        NoiseSchedule([])
