from itertools import product
from math import cos, exp, log, sin
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from hookdiff.diffusion import EDM, VP, Diffusion, EDMWeighting, Process
from hookdiff.diffusion.prediction import (
    EDMPrediction,
    Epsilon,
    FlowPrediction,
    Prediction,
    SamplePrediction,
    VPrediction,
    noise_from_x0,
    q_sample,
)
from tests.conftest import refused
from tests.diffusion.conftest import PREDICTIONS

SCHEDULE = VP("linear").tables
pixels = st.floats(-3, 3)
angles = st.floats(0.01, 1.56)  # alpha = cos, sigma = sin: alphas_cumprod from 0.9999 to 0.0001
rates = st.floats(0.01, 3)  # alpha or sigma of any process
spreads = st.sampled_from([0.2, 0.5, 1.0, 1.7])  # sigma_data


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def prediction(name: str, sigma_data: float = 0.5) -> Prediction:
    return EDMPrediction(sigma_data) if name == "edm" else Prediction.of(name)


def at(timestep: int) -> tuple[Tensor, Tensor]:
    return SCHEDULE.sqrt_alphas_cumprod[timestep], SCHEDULE.sqrt_one_minus_alphas_cumprod[timestep]


def approx(expected: Any) -> object:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_known_values_at_timestep_499() -> None:
    x0, noise = scalar(0.3), scalar(-0.7)
    x_t, v = q_sample(x0, noise, *at(499)), VPrediction().target(x0, noise, *at(499))
    assert (float(x_t), float(v)) == approx((-0.587831482032, -0.484204655835))
    assert (float(x_t**2 + v**2), float(x0**2 + noise**2)) == approx((0.58, 0.58))
    assert Epsilon().target(x0, noise, *at(499)) is noise
    assert SamplePrediction().target(x0, noise, *at(499)) is x0


# Alpha and sigma, the time, and the image and the noise of 1.1 in the best prediction for N(2, 0.25) data.
BEST: dict[str, Any] = {
    "ddpm": (at(499), torch.tensor([499]), 2.04016565438, 0.550130751967),
    "edm": ((1.0, 1.0), torch.zeros(1), 1.82, -0.72),
    "flow": ((0.7, 0.3), scalar(300.0).view(1), 1.75294117647, -0.423529411765),
}


@pytest.mark.parametrize(
    ("process", "name"), [pair for pair in product(BEST, PREDICTIONS) if pair != ("flow", "epsilon")]
)
def test_the_best_prediction_for_gaussian_data(gaussian: type, process: str, name: str) -> None:
    rates, time, image, eps = BEST[process]
    diffusion, x_t = Diffusion(process, name), scalar(1.1).view(1, 1, 1, 1)
    kind = diffusion.prediction
    output = gaussian(diffusion, mu=2, s=0.5)(kind.network_input(x_t, *rates), time)
    x0, noise = kind.x0_and_noise(output, x_t, *rates)
    assert (float(x0), float(noise)) == (approx(image), approx(eps))


@given(pixels, pixels, st.floats(0, 1))
def test_flow_points_from_the_image_to_the_noise(x0: float, noise: float, t: float) -> None:
    u = FlowPrediction().target(scalar(x0), scalar(noise), 1 - t, t)
    x_t = q_sample(scalar(x0), scalar(noise), 1 - t, t)
    assert float(u) == noise - x0
    assert float(x_t) == approx(x0 + t * float(u))  # so d x_t / d t = u, and noise is at t = 1
    found = FlowPrediction().x0_and_noise(u, x_t, 1 - t, t)
    expected = [float(x_t - t * u), float(x_t + (1 - t) * u)]
    assert [*map(float, found)] == pytest.approx(expected, abs=1e-12)


@given(pixels, pixels, angles)
def test_v_is_a_rotation(x0: float, noise: float, angle: float) -> None:
    alpha, sigma = cos(angle), sin(angle)
    x_t = q_sample(scalar(x0), scalar(noise), alpha, sigma)
    v = VPrediction().target(scalar(x0), scalar(noise), alpha, sigma)
    assert float(x_t**2 + v**2) == approx(x0**2 + noise**2)
    found = VPrediction().x0_and_noise(v, x_t, alpha, sigma)
    assert [*map(float, found)] == approx([float(alpha * x_t - sigma * v), float(sigma * x_t + alpha * v)])


def check_there_and_back(kind: Prediction, image: Tensor, eps: Tensor, alpha: float, sigma: float, atol: float) -> None:
    x_t = q_sample(image, eps, alpha, sigma)
    output = kind.target(image, eps, alpha, sigma)
    found = kind.x0_and_noise(output, x_t, alpha, sigma)
    for actual, expected in zip(found, (image, eps), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    torch.testing.assert_close(kind.target(*found, alpha, sigma), output, rtol=0, atol=atol)
    torch.testing.assert_close(q_sample(*found, alpha, sigma), x_t, rtol=0, atol=atol)


@pytest.mark.parametrize("name", PREDICTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(pixels, pixels, angles, spreads)
def test_image_and_noise_come_back(
    name: str, dtype: torch.dtype, x0: float, noise: float, angle: float, sigma_data: float
) -> None:
    alpha, sigma = cos(angle), sin(angle)
    image, eps = torch.tensor([x0, noise], dtype=dtype)
    atol = 1e-4 if dtype == torch.float32 else 1e-12  # epsilon divides by alpha to get x0, and alpha may be 0.01
    check_there_and_back(prediction(name, sigma_data), image, eps, alpha, sigma, atol)
    found = noise_from_x0(q_sample(image, eps, alpha, sigma), image, alpha, sigma)
    torch.testing.assert_close(found, eps, rtol=0, atol=atol)


@pytest.mark.parametrize("name", PREDICTIONS)
@given(pixels, pixels, rates, rates, spreads)
def test_image_and_noise_come_back_at_any_two_rates(
    name: str, x0: float, noise: float, alpha: float, sigma: float, sigma_data: float
) -> None:
    check_there_and_back(prediction(name, sigma_data), scalar(x0), scalar(noise), alpha, sigma, 1e-10)


@pytest.mark.parametrize("name", PREDICTIONS)
@given(pixels, pixels, rates, spreads)
def test_image_and_noise_come_back_at_the_ends(
    name: str, x0: float, noise: float, rate: float, sigma_data: float
) -> None:
    kind, image, eps = prediction(name, sigma_data), scalar(x0), scalar(noise)
    if not kind.needs_alpha:
        check_there_and_back(kind, image, eps, 0.0, rate, 1e-12)
    if not kind.needs_sigma:
        check_there_and_back(kind, image, eps, rate, 0.0, 1e-12)


def test_only_epsilon_needs_alpha_and_only_sample_needs_sigma() -> None:
    one = torch.ones(1)
    for name in PREDICTIONS:
        kind = prediction(name)
        assert kind.x0_and_noise(one, one, 0.0, 1.0)[0].isfinite().all() == (not kind.needs_alpha)
        finite = kind.x0_and_noise(one, 2 * one, 1.0, 0.0)[1].isfinite().all()
        assert finite == (not kind.needs_sigma)
    assert [name for name in PREDICTIONS if prediction(name).needs_alpha] == ["epsilon"]
    assert [name for name in PREDICTIONS if prediction(name).needs_sigma] == ["sample"]


@pytest.mark.parametrize("name", PREDICTIONS)
@given(pixels, pixels, pixels, rates, rates, spreads)
def test_error_ratios(
    name: str, x0: float, other: float, x_t: float, alpha: float, sigma: float, sigma_data: float
) -> None:
    """The ratio converts a squared error of x0 to a squared error of the output; the loss weights use the ratio."""
    kind = prediction(name, sigma_data)

    def output(image: float) -> Tensor:
        return kind.target(scalar(image), noise_from_x0(scalar(x_t), scalar(image), alpha, sigma), alpha, sigma)

    assume(abs(x0 - other) > 1e-3)
    ratio = float(output(x0) - output(other)) ** 2 / (x0 - other) ** 2
    assert float(kind.error_ratio(alpha, sigma)) / sigma**2 == pytest.approx(ratio, rel=1e-6)


@given(pixels, pixels, angles)
def test_v_is_edm_with_unit_data(x0: float, noise: float, angle: float) -> None:
    """Karras et al. 2022, table 1, for sigma_data = 1: the network computes -v."""
    alpha, sigma, edm = cos(angle), sin(angle), EDMPrediction(1.0)
    image, eps = scalar(x0), scalar(noise)
    x_t, v = q_sample(image, eps, alpha, sigma), VPrediction().target(image, eps, alpha, sigma)
    assert float(edm.network_input(x_t / alpha, 1.0, sigma / alpha)) == approx(float(x_t))
    assert float(edm.target(image, eps, 1.0, sigma / alpha)) == pytest.approx(float(-v), abs=1e-9)
    assert float(edm.x0_and_noise(-v, x_t / alpha, 1.0, sigma / alpha)[0]) == pytest.approx(x0, abs=1e-9)


@given(pixels, pixels, rates, rates, spreads)
def test_edm_treats_any_process_as_variance_exploding(
    x0: float, noise: float, alpha: float, sigma: float, sigma_data: float
) -> None:
    edm, image, eps, ratio = EDMPrediction(sigma_data), scalar(x0), scalar(noise), sigma / alpha
    x_t = q_sample(image, eps, alpha, sigma)
    assert float(edm.target(image, eps, alpha, sigma)) == approx(float(edm.target(image, eps, 1.0, ratio)))
    assert float(edm.network_input(x_t, alpha, sigma)) == approx(float(edm.network_input(x_t / alpha, 1.0, ratio)))


def preconditioning(sigma_data: float, sigma: float) -> tuple[float, float, float, float]:
    """Return c_skip, c_out, c_in and c_noise, derived from the network's input and output."""
    edm, one, zero = EDMPrediction(sigma_data), scalar(1.0), scalar(0.0)
    skip, out = edm.x0_and_noise(zero, one, 1.0, sigma)[0], edm.x0_and_noise(one, zero, 1.0, sigma)[0]
    time = EDM(time_scale=1.0).network_time(scalar(sigma).view(1))
    return float(skip), float(out), float(edm.network_input(one, 1.0, sigma)), float(time)


@pytest.mark.parametrize(
    ("sigma_data", "sigma", "c_skip", "c_out", "c_in", "c_noise", "weight"),
    [
        (0.5, 0.002, 0.9999840003, 0.001999984, 1.999984, -1.553652025, 250004),
        (0.5, 0.5, 0.5, 0.3535533906, 1.414213562, -0.1732867951, 8),
        (0.5, 1, 0.2, 0.4472135955, 0.894427191, 0, 5),
        (0.5, 80, 3.906097418e-05, 0.4999902347, 0.01249975587, 1.095506659, 4.00015625),
        (1, 1, 0.5, 0.7071067812, 0.7071067812, 0, 2),
    ],
)
def test_edm_table(
    sigma_data: float, sigma: float, c_skip: float, c_out: float, c_in: float, c_noise: float, weight: float
) -> None:
    assert preconditioning(sigma_data, sigma) == pytest.approx((c_skip, c_out, c_in, c_noise), rel=1e-9)
    found = EDMWeighting(sigma_data).weights(SamplePrediction(), scalar(1.0), scalar(sigma))
    assert float(found) == pytest.approx(weight, rel=1e-9)


@given(st.floats(1e-3, 1e3), spreads)
def test_edm_identities(sigma: float, sigma_data: float) -> None:
    c_skip, c_out, c_in, c_noise = preconditioning(sigma_data, sigma)
    weight = float(EDMWeighting(sigma_data).weights(SamplePrediction(), scalar(1.0), scalar(sigma)))
    assert (weight * c_out**2, c_in**2 * (sigma**2 + sigma_data**2)) == approx((1, 1))
    assert (1 - c_skip) ** 2 * sigma_data**2 + c_skip**2 * sigma**2 == approx(c_out**2)
    assert c_noise == approx(log(sigma) / 4)
    # so the weighted loss of a zero network is 1 at every sigma, for images with the deviation sigma_data
    edm, one, zero = EDMPrediction(sigma_data), scalar(1.0), scalar(0.0)
    of_image, of_noise = edm.target(one, zero, 1.0, sigma), edm.target(zero, one, 1.0, sigma)
    assert float((sigma_data * of_image) ** 2 + of_noise**2) == approx(1)


@given(pixels, pixels, spreads)
def test_edm_limits(x: float, output: float, sigma_data: float) -> None:
    little, _ = EDMPrediction(sigma_data).x0_and_noise(scalar(output), scalar(x), 1.0, 1e-9)
    much, _ = EDMPrediction(sigma_data).x0_and_noise(scalar(output), scalar(x), 1.0, 1e9)
    assert (float(little), float(much)) == pytest.approx((x, sigma_data * output), abs=1e-7)
    assert preconditioning(sigma_data, 1e9)[1] == pytest.approx(sigma_data)


@given(pixels, angles, spreads)
def test_a_zero_network_is_the_best_for_its_sigma_data(gaussian: type, x: float, angle: float, s: float) -> None:
    diffusion = Diffusion("edm", EDMPrediction(s))
    time = scalar(log(sin(angle) / cos(angle)) / 4 * 1000).view(1)
    assert float(gaussian(diffusion, mu=0, s=s)(scalar(x).view(1, 1, 1, 1), time)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", PREDICTIONS)
def test_score_of_a_mixture(name: str) -> None:
    """Two narrow Gaussians at -1 and 1: the score is minus the noise over sigma."""
    std, sigma, x = 0.1, 0.7, scalar(0.3).requires_grad_()
    variance = std**2 + sigma**2
    density = (-((x + 1) ** 2) / (2 * variance)).exp() + (-((x - 1) ** 2) / (2 * variance)).exp()
    (score,) = torch.autograd.grad(density.log(), x)
    x = x.detach()
    shares = [exp(-((0.3 - mean) ** 2) / (2 * variance)) for mean in (-1, 1)]
    best = sum(
        share * (mean + std**2 / variance * (0.3 - mean)) for share, mean in zip(shares, (-1, 1), strict=True)
    ) / sum(shares)
    kind = prediction(name)
    output = kind.target(scalar(best), noise_from_x0(x, scalar(best), 1.0, sigma), 1.0, sigma)
    x0, noise = kind.x0_and_noise(output, x, 1.0, sigma)
    found = (float(x0), float(-noise / sigma), float(score))
    assert found == approx((0.532308575658, 0.474099133996, 0.474099133996))


@pytest.mark.parametrize("process", ["flow", VP(rescale_betas_zero_snr=True), VP("cosine", 20, True)])
def test_epsilon_is_refused_where_the_process_ends_in_pure_noise(process: Process | str) -> None:
    with refused(ValueError, "'prediction'", "'epsilon'", "'v_prediction'", "'flow_prediction'", "'sample'", "'edm'"):
        Diffusion(process, "epsilon")
    for name in PREDICTIONS[1:]:
        assert Diffusion(process, name).prediction == Prediction.of(name)
