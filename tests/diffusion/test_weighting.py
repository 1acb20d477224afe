from __future__ import annotations

from itertools import product
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookdiff.diffusion import (
    PREDICTION_TYPES,
    WEIGHTINGS,
    Diffusion,
    NoiseSchedule,
    Parametrization,
    loss_weights,
    make_parametrization,
    make_schedule,
    noise_from_x0,
)

SCHEDULE = make_schedule("linear", 1000)
ALPHA, SIGMA = SCHEDULE.sqrt_alphas_cumprod, SCHEDULE.sqrt_one_minus_alphas_cumprod
OPTIONS = {"snr_gamma": 5.0, "p2_k": 1.0, "p2_gamma": 1.0, "sigma_data": 0.5}
rates = st.floats(0.01, 3)
weightings = st.sampled_from([name for name in WEIGHTINGS if name != "uniform"])


def linear(name: str, prediction_type: str, **options: float) -> Tensor:
    """The weights at all timesteps of the linear schedule, float64."""
    return loss_weights(name, make_parametrization(prediction_type), ALPHA, SIGMA, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("timestep", "epsilon", "v_prediction", "sample"),
    [
        (0, 0.000500050005, 0.0005, 5),
        (99, 0.5740232504, 0.5149092716, 5),
        (249, 1, 0.5240853738, 1.101217204),
        (499, 1, 0.07858724288, 0.08528994446),
        (999, 1, 4.035829765e-05, 4.035992651e-05),
    ],
)
def test_min_snr(timestep: int, epsilon: float, v_prediction: float, sample: float) -> None:
    for name, expected in (("epsilon", epsilon), ("v_prediction", v_prediction), ("sample", sample)):
        assert float(linear("min_snr", name)[timestep]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "mean"),
    [("epsilon", 0.913073050764), ("v_prediction", 0.191863132274), ("sample", 1.04971115958)],
)
def test_min_snr_on_average(name: str, mean: float) -> None:
    assert float(linear("min_snr", name).mean()) == pytest.approx(mean, rel=1e-9)


@given(st.floats(0.1, 50))
def test_min_snr_is_the_formula_of_the_paper(gamma: float) -> None:
    snr = SCHEDULE.snr
    least = snr.clamp(max=gamma)
    for name, expected in (("sample", least), ("epsilon", least / snr), ("v_prediction", least / (snr + 1))):
        torch.testing.assert_close(linear("min_snr", name, snr_gamma=gamma), expected, rtol=1e-9, atol=0)


def test_min_snr_for_v_is_alphas_cumprod_below_the_knee() -> None:
    torch.testing.assert_close(
        linear("min_snr", "v_prediction")[130:], SCHEDULE.alphas_cumprod[130:], rtol=1e-9, atol=0
    )
    assert not torch.isclose(linear("min_snr", "v_prediction")[129], SCHEDULE.alphas_cumprod[129], rtol=1e-3)


def test_min_snr_is_not_what_others_made_of_it() -> None:
    snr, weights = SCHEDULE.snr, linear("min_snr", "v_prediction")
    shifted = (snr + 1).clamp(max=5) / (snr + 1)
    assert shifted[999] == 1  # for every small SNR
    assert weights[999] < 1e-4
    added = snr.clamp(max=5) / snr + 1
    assert (added >= 1).all()
    for wrong in (shifted, added):
        assert not torch.isclose(weights, wrong, rtol=1e-3)[130:].any()


def test_debiased() -> None:
    weights = linear("debiased", "epsilon")[[0, 499, 999]].tolist()
    assert weights == pytest.approx([0.0316227766, 3.424136619, 157.4072808], rel=1e-9)
    expected = SCHEDULE.snr.clamp(max=1000).rsqrt()
    torch.testing.assert_close(linear("debiased", "epsilon"), expected, rtol=1e-9, atol=0)


def test_p2() -> None:
    weights = linear("p2", "epsilon")[[0, 499, 999]].tolist()
    assert weights == pytest.approx([0.0001, 0.9214127571, 0.9999596417], rel=1e-9)
    expected = (0.5 + SCHEDULE.snr) ** -0.7
    torch.testing.assert_close(linear("p2", "epsilon", p2_k=0.5, p2_gamma=0.7), expected, rtol=1e-9, atol=0)
    assert torch.equal(linear("p2", "epsilon", p2_gamma=0.0), torch.ones(1000, dtype=torch.float64))


@given(rates, st.sampled_from([0.2, 0.5, 1.0]))
def test_edm_makes_the_networks_own_error_count_alike(sigma: float, sigma_data: float) -> None:
    rates = torch.tensor([1, sigma], dtype=torch.float64)
    of_network = loss_weights("edm", make_parametrization("edm", sigma_data), *rates, sigma_data=sigma_data)
    assert float(of_network) == pytest.approx(1, rel=1e-9)


@given(weightings, rates, rates, st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3))
def test_a_weighting_is_the_same_loss_whatever_the_network_predicts(
    name: str, alpha: float, sigma: float, x0: float, guess: float, x_t: float
) -> None:
    one = torch.ones((), dtype=torch.float64)
    losses = []
    for prediction_type in PREDICTION_TYPES:
        kind = make_parametrization(prediction_type)

        def output(image: float, kind: Parametrization = kind) -> Tensor:
            return kind.target(image * one, noise_from_x0(x_t * one, image * one, alpha, sigma), alpha, sigma)

        weight = loss_weights(name, kind, alpha * one, sigma * one, **OPTIONS)
        losses.append(float(weight * (output(x0) - output(guess)) ** 2))
    snr = (alpha / sigma) ** 2
    on_x0 = {
        "min_snr": min(snr, 5),
        "debiased": snr / sqrt(min(snr, 1000)),
        "p2": snr / (1 + snr),
        "edm": snr + 4,  # 1 / sigma_data² more than the signal-to-noise ratio
    }
    assert losses == pytest.approx([losses[1]] * 5, rel=1e-6, abs=1e-9)
    assert losses[1] == pytest.approx(on_x0[name] * (x0 - guess) ** 2, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(1e-5, 0.3), min_size=1, max_size=30), weightings, st.sampled_from(PREDICTION_TYPES[1:]))
def test_weights_are_finite_on_random_tables(betas: list[float], name: str, prediction_type: str) -> None:
    table = NoiseSchedule([*betas, 1.0])  # which leaves nothing of the image
    for dtype in (torch.float32, torch.float64):
        alpha = table.sqrt_alphas_cumprod.to(dtype)
        weights = loss_weights(
            name, make_parametrization(prediction_type), alpha, table.sqrt_one_minus_alphas_cumprod.to(dtype), **OPTIONS
        )
        assert weights.dtype == dtype
        assert weights.shape == alpha.shape
        assert weights.isfinite().all()
        assert (weights >= 0).all()


@pytest.mark.parametrize(("name", "prediction_type"), list(product(WEIGHTINGS, PREDICTION_TYPES)))
def test_weights_where_nothing_is_left_of_the_image(name: str, prediction_type: str) -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    weight = float(loss_weights(name, make_parametrization(prediction_type), zero, one, **OPTIONS))
    # sigma_data is 0.5: the edm weight on x0 is 4 there, and the network's own error counts a quarter of that
    of_x0 = {"min_snr": 0.0, "debiased": 0.0, "p2": 0.0, "edm": 4.0}
    if name == "uniform" or (prediction_type == "epsilon" and name != "edm"):
        assert weight == 1  # the formula is 0 / 0 for the noise
    elif prediction_type == "epsilon":
        assert weight == torch.inf  # as it must: an error of the noise is one of x0 without end
    else:
        assert weight == (of_x0[name] / 4 if prediction_type == "edm" else of_x0[name])


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_objective_weighs_its_samples(name: str) -> None:
    diffusion = Diffusion(prediction_type="v_prediction", weighting=name)
    alpha, sigma = ALPHA.float(), SIGMA.float()
    expected = loss_weights(name, make_parametrization("v_prediction"), alpha, sigma, **OPTIONS)
    assert torch.equal(diffusion.weights(alpha, sigma), expected)
