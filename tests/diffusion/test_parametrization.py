from __future__ import annotations

from math import cos, sin, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookdiff.diffusion import (
    PREDICTION_TYPES,
    Epsilon,
    VPrediction,
    make_schedule,
    noise_from_x0,
    q_sample,
)

SCHEDULE = make_schedule("linear", 1000)
pixels = st.floats(-3, 3)
angles = st.floats(0.01, 1.56)  # alpha = cos, sigma = sin: alphas_cumprod from 0.9999 to 0.0001


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def rates(timestep: int) -> tuple[Tensor, Tensor]:
    return SCHEDULE.sqrt_alphas_cumprod[timestep], SCHEDULE.sqrt_one_minus_alphas_cumprod[timestep]


def approx(expected: float) -> object:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_example() -> None:
    x0, noise = scalar(0.3), scalar(-0.7)
    x_t, v = q_sample(x0, noise, *rates(499)), VPrediction().target(x0, noise, *rates(499))
    assert float(x_t) == approx(-0.587831482032)
    assert float(v) == approx(-0.484204655835)
    assert float(x_t**2 + v**2) == approx(0.58)
    assert Epsilon().target(x0, noise, *rates(499)) is noise


def test_the_best_prediction_for_gaussian_data() -> None:
    mu, s, x_t = 2.0, 0.5, scalar(1.1)
    alpha, sigma = rates(499)
    eps = sigma * (x_t - alpha * mu) / (alpha**2 * s**2 + sigma**2)
    assert float(eps) == approx(0.550130751967)
    x0, noise = Epsilon().x0_and_noise(eps, x_t, alpha, sigma)
    assert float(x0) == approx(2.04016565438)
    assert float(VPrediction().target(x0, noise, alpha, sigma)) == approx(-1.80413961255)


@given(pixels, pixels, angles)
@settings(deadline=None)
def test_v_is_a_rotation(x0: float, noise: float, angle: float) -> None:
    alpha, sigma = cos(angle), sin(angle)
    x_t = q_sample(scalar(x0), scalar(noise), alpha, sigma)
    v = VPrediction().target(scalar(x0), scalar(noise), alpha, sigma)
    assert float(x_t**2 + v**2) == approx(x0**2 + noise**2)


@pytest.mark.parametrize("name", sorted(PREDICTION_TYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(pixels, pixels, angles)
@settings(deadline=None)
def test_image_and_noise_come_back(
    name: str,
    dtype: torch.dtype,
    x0: float,
    noise: float,
    angle: float,
) -> None:
    alpha, sigma = cos(angle), sin(angle)
    image, eps = torch.tensor([x0, noise], dtype=dtype)
    parametrization = PREDICTION_TYPES[name]
    x_t = q_sample(image, eps, alpha, sigma)
    output = parametrization.target(image, eps, alpha, sigma)
    found = parametrization.x0_and_noise(output, x_t, alpha, sigma)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12  # x0 from the noise is divided by alpha, 0.01
    for actual, expected in zip(found, (image, eps), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(noise_from_x0(x_t, image, alpha, sigma), eps, rtol=0, atol=tolerance)
    torch.testing.assert_close(parametrization.target(*found, alpha, sigma), output, rtol=0, atol=tolerance)


@given(pixels, pixels, pixels, angles)
@settings(deadline=None)
def test_error_ratios(x0: float, other: float, x_t: float, angle: float) -> None:
    """The same mistake in x0, seen in the three spaces: the weights of the losses rest on this."""
    alpha, sigma = cos(angle), sin(angle)
    snr = (alpha / sigma) ** 2

    def in_noise_and_v(image: float) -> tuple[Tensor, Tensor]:
        noise = noise_from_x0(scalar(x_t), scalar(image), alpha, sigma)
        return noise, VPrediction().target(scalar(image), noise, alpha, sigma)

    (noise, v), (other_noise, other_v) = in_noise_and_v(x0), in_noise_and_v(other)
    assert float(noise - other_noise) ** 2 == pytest.approx(snr * (x0 - other) ** 2, rel=1e-9, abs=1e-9)
    assert float(v - other_v) ** 2 == pytest.approx((snr + 1) * (x0 - other) ** 2, rel=1e-9, abs=1e-9)


@given(pixels, pixels, angles)
@settings(deadline=None)
def test_v_is_edm_with_unit_data(x0: float, noise: float, angle: float) -> None:
    """Karras et al. 2022, table 1, for sigma_data = 1: the network computes -v."""
    alpha, sigma = cos(angle), sin(angle)
    sigma_edm = sigma / alpha
    x_edm = q_sample(scalar(x0), scalar(noise), alpha, sigma) / alpha
    output = -VPrediction().target(scalar(x0), scalar(noise), alpha, sigma)
    c_skip, c_out = 1 / (sigma_edm**2 + 1), sigma_edm / sqrt(sigma_edm**2 + 1)
    assert float(c_skip * x_edm + c_out * output) == pytest.approx(x0, abs=1e-9)


def test_rates_of_a_batch() -> None:
    timesteps = torch.tensor([0, 500, 999])
    alpha = SCHEDULE.gather(("sqrt_alphas_cumprod",), timesteps, ndim=4)[0]
    sigma = SCHEDULE.gather(("sqrt_one_minus_alphas_cumprod",), timesteps, ndim=4)[0]
    x0, noise = torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x_t = q_sample(x0, noise, alpha, sigma)
    assert x_t.dtype == torch.float32
    for k, t in enumerate(timesteps.tolist()):
        expected = q_sample(x0[k].double(), noise[k].double(), *rates(t))
        torch.testing.assert_close(x_t[k], expected.float(), rtol=1e-5, atol=1e-6)
