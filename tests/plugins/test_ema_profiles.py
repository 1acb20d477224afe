"""Profiles of averages: known answers of EDM2 (arXiv 2312.02696) and of the usual decays and warm-ups."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff_ema import EMA, NoWarmup, Power, Ratio
from hookdiff_ema.profiles import MAX_STD, fit, gamma_of, half_life_decay, newest, overlap, power_decay, step_weights

stds = st.floats(0.01, MAX_STD)


@pytest.mark.parametrize(
    ("half_life", "decay"), [(6931.12522623, 0.9999), (692.800549179, 0.999), (138.282572986, 0.995)]
)
def test_half_lives(half_life, decay):
    assert half_life_decay(half_life) == pytest.approx(decay, rel=1e-12)
    assert half_life_decay(half_life) ** half_life == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("warmup", "known"),
    [
        (Ratio(), {10: 0.55, 100: 0.9181818182, 1000: 0.9910891089}),
        (Power(power=2 / 3), {0: 0, 1: 0.3700394751, 10: 0.7978199918, 100: 0.953890995, 10**4: 0.9978457089}),
        (Power(power=2 / 3), {10**6: 0.9999000001}),
        (Power(), {10**4: 0.99900007499}),
        (Power(inv_gamma=2), {2 * 10**4: 0.99900007499}),
    ],
)
def test_known_answers_of_warm_ups(warmup, known):
    assert {num: warmup.highest(num) for num in known} == pytest.approx(known, rel=1e-9)


@given(n=st.integers(0, 10**6))
def test_warm_ups_rise(n):
    assert 0 < Ratio().highest(n) < Ratio().highest(n + 1) < 1
    assert 0 <= Power().highest(n) < Power().highest(n + 1) < 1


GAMMAS = {
    0.01: 96.994897823710,
    0.025: 36.986839712425,
    0.05: 16.9721986023,
    0.075: 10.289116448984,
    0.10: 6.9372039376,
    0.15: 3.5578687749,
    0.20: 1.8262137799,
    0.25: 0.719823958001,
    0.28867513459: 0.0,
}


@pytest.mark.parametrize(("std", "gamma"), GAMMAS.items())
def test_exponents_of_widths(std, gamma):
    assert gamma_of(std) == pytest.approx(gamma, rel=1e-10, abs=1e-9)


@given(std=stds)
def test_a_width_survives_the_round_trip_through_gamma(std):
    gamma = gamma_of(std)
    assert math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2) == pytest.approx(std, rel=1e-9)  # EDM2 appendix C


@pytest.mark.parametrize(
    ("std", "step", "decay"),
    [
        (0.10, 2, 0.00408003165965),
        (0.10, 10**6 / 2048, 0.983859612877),
        (0.05, 10**6 / 2048, 0.963825704953),
        (0.05, 10, 0.15053493247717),
        (0.05, 1000, 0.98217950629666),
        (0.10, 10, 0.43332472068213),
        (0.10, 1000, 0.9920902726450789),
        (0.05, 1, 0),
        (MAX_STD, 4, 0.75),  # a plain mean
    ],
)
def test_decays_of_power_functions(std, step, decay):
    assert power_decay(step, gamma_of(std)) == pytest.approx(decay, rel=1e-10)


@given(std=stds, steps=st.integers(1, 60))
def test_the_decays_make_the_profile(std, steps):
    gamma, shares = gamma_of(std), np.zeros(steps)
    for step in range(1, steps + 1):
        decay = power_decay(step, gamma)
        shares[:step] *= decay
        shares[step - 1] += 1 - decay
    expected = np.diff((np.arange(steps + 1) / steps) ** (gamma + 1))
    np.testing.assert_allclose(shares, expected, atol=1e-12)


@given(
    start=st.floats(-3, 3),
    values=st.lists(st.floats(-3, 3), min_size=1, max_size=50),
    length=st.sampled_from([{"decay": 0.9}, {"half_life": 3.0}, {"std": 0.1}]),
    warmup=st.sampled_from([Ratio(), NoWarmup()]),
)
def test_the_weights_of_the_steps_make_the_average(start, values, length, warmup):
    (average,) = EMA(**length, warmup=warmup).averages
    average.start({"w": torch.tensor([start], dtype=torch.float64)})
    for number, value in enumerate(values):
        average.update([torch.tensor([value], dtype=torch.float64)], number)
    shares = step_weights(average.decay, len(values))
    assert shares.sum() == pytest.approx(1)
    assert shares @ np.array([start, *values]) == pytest.approx(average.shadow["w"].item(), abs=1e-9)


def test_the_newest_steps_of_an_average_are_counted():
    halving = step_weights(lambda n: 0.5, 10)  # 1/2, 1/4, ... from the end
    assert [newest(halving, share) for share in (0.5, 0.75, 0.76, 1.0)] == [1, 2, 3, 11]


@given(one=stds, other=stds, step=st.integers(1, 50), other_step=st.integers(1, 50))
def test_inner_products_are_integrals(one, other, step, other_step):
    a, b = gamma_of(one), gamma_of(other)
    end = min(step, other_step)
    edges = np.linspace(0, end, 20001)
    times = (edges[1:] + edges[:-1]) / 2
    integrand = (a + 1) * times**a / float(step) ** (a + 1) * (b + 1) * times**b / float(other_step) ** (b + 1)
    exact = overlap(*(np.float64(value) for value in (step, a, other_step, b)))
    assert float(exact) == pytest.approx(integrand.sum() * end / 20000, rel=1e-4, abs=1e-12)


def walk(steps, size=64):
    return np.random.default_rng(0).standard_normal((steps, size)).cumsum(0)


def averaged(values, std, step):
    edges = (np.arange(step + 1) / step) ** (gamma_of(std) + 1)
    return np.diff(edges) @ values[:step]


@pytest.mark.parametrize(
    ("count", "dtype", "error"), [(8, np.float64, 8e-4), (64, np.float64, 1.3e-6), (64, np.float16, 2e-4)]
)
def test_a_random_walk_is_reconstructed(count, dtype, error):
    # Relative errors at std 0.075 that were computed without this code.
    values, last = walk(4096), 4096
    steps = np.repeat(np.arange(1, count + 1) * last // count, 2)
    widths = np.tile([0.05, 0.10], count)
    kept = np.stack([averaged(values, *place) for place in zip(widths, steps, strict=True)]).astype(dtype)
    found = fit(steps.tolist(), widths.tolist(), last, [0.075])
    made, true = found.weights[:, 0] @ kept, averaged(values, 0.075, last)
    assert np.linalg.norm(made - true) / np.linalg.norm(true) == pytest.approx(error, rel=0.15)


@given(
    kept=st.lists(st.tuples(st.integers(1, 100), st.sampled_from([0.02, 0.05, 0.1, 0.2])), min_size=1, unique=True),
    std=stds,
    step=st.integers(1, 100),
)
def test_a_reconstruction_keeps_constant_weights(kept, std, step):
    found = fit([place for place, _ in kept], [width for _, width in kept], step, [std])
    assert found.weights.sum() == pytest.approx(1, abs=1e-6)
    assert found.errors[0] >= 0


@given(place=st.integers(0, 7), count=st.integers(1, 8))
def test_a_stored_profile_is_reconstructed_exactly(place, count):
    steps, widths = np.repeat(np.arange(1, count + 1) * 100, 2), np.tile([0.05, 0.1], count)
    place %= 2 * count
    found = fit(steps.tolist(), widths.tolist(), steps[place], [widths[place]])
    np.testing.assert_allclose(found.weights[:, 0], np.eye(2 * count)[place], atol=1e-9)
    assert found.errors[0] < 1e-7


def test_more_snapshots_reconstruct_more_widths():
    errors = [
        fit([k * 100 // count for k in range(1, count + 1)] * 2, [0.05] * count + [0.1] * count, 100, [0.075]).errors[0]
        for count in (1, 2, 5, 10, 50)
    ]
    assert errors == sorted(errors, reverse=True)
