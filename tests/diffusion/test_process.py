from __future__ import annotations

from math import inf, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookdiff.diffusion import (
    IMAGE,
    Discrete,
    Flow,
    NoiseSchedule,
    Process,
    VarianceExploding,
    karras_sigmas,
    make_schedule,
    sampling_timesteps,
)

LINEAR = Discrete(make_schedule("linear", 1000))
random_betas = st.lists(st.floats(1e-4, 0.3), min_size=1, max_size=60)
spacings = st.sampled_from(["trailing", "leading"])
ratios = st.floats(0.02, 100)

KARRAS_18 = [
    80, 57.58598472, 40.7855738, 28.3745846, 19.35245298, 12.91008238, 8.400935309, 5.315194522, 3.25682152,
    1.923339837, 1.088170637, 0.5853481232, 0.2964422845, 0.1395164687, 0.05994731124, 0.02293451837, 0.007528019963,
    0.002,
]  # fmt: skip


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_karras_sigmas() -> None:
    assert karras_sigmas(18, 0.002, 80) == pytest.approx(KARRAS_18, rel=1e-9)
    points = VarianceExploding().points(18, "karras", 7.0)
    assert [p.sigma for p in points] == pytest.approx(KARRAS_18, rel=1e-9)
    assert {p.alpha for p in points} == {1.0}
    assert [p.time for p in points] == pytest.approx([250 * log(s) for s in KARRAS_18], rel=1e-8)
    assert IMAGE.ratio == 0


@given(st.integers(1, 50), st.floats(1e-4, 0.5), st.floats(1, 200), st.floats(0.5, 10))
def test_karras_sigmas_are_even_in_a_power(steps: int, low: float, high: float, rho: float) -> None:
    sigmas = karras_sigmas(steps, low, high, rho)
    assert len(sigmas) == steps
    assert sigmas[0] == high
    assert sigmas[-1] == (low if steps > 1 else high)
    roots = column(*sigmas) ** (1 / rho)
    torch.testing.assert_close(roots.diff(), roots.diff().mean().expand(steps - 1) if steps > 1 else roots.diff())


def test_spacings() -> None:
    assert sampling_timesteps(1000, 50) == list(range(999, 0, -20))
    assert sampling_timesteps(1000, 50, "leading") == list(range(980, -1, -20))
    assert sampling_timesteps(1000, 3) == [999, 666, 332]
    with pytest.raises(ValueError, match="'quadratic'; known: trailing, leading"):
        sampling_timesteps(1000, 50, "quadratic")
    with pytest.raises(ValueError, match=r"sampling.steps = 50 is more than diffusion.timesteps = 10"):
        sampling_timesteps(10, 50)


@given(st.integers(1, 1500), spacings, st.data())
def test_timesteps_are_distinct_and_in_range(timesteps: int, spacing: str, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, timesteps))
    visited = sampling_timesteps(timesteps, steps, spacing)
    assert len(visited) == steps
    assert visited == sorted(set(visited), reverse=True)
    assert visited[0] == timesteps - 1 if spacing == "trailing" else visited[-1] == 0
    assert 0 <= visited[-1] <= visited[0] < timesteps


# Discrete


@given(random_betas, st.data())
def test_points_are_those_of_the_tables(betas: list[float], data: st.DataObject) -> None:
    schedule = NoiseSchedule(betas)
    steps, spacing = data.draw(st.integers(1, len(betas))), data.draw(spacings)
    for point, t in zip(
        Discrete(schedule).points(steps, spacing, 7.0), sampling_timesteps(len(betas), steps, spacing), strict=True
    ):
        assert type(point.time) is int
        assert point.time == t
        assert point.alpha == pytest.approx(float(schedule.sqrt_alphas_cumprod[t]), rel=1e-15)
        assert point.sigma == pytest.approx(float(schedule.sqrt_one_minus_alphas_cumprod[t]), rel=1e-15)


@given(random_betas)
def test_a_ratio_leads_back_to_its_timestep(betas: list[float]) -> None:
    schedule = NoiseSchedule(betas)
    for t, ratio in enumerate((schedule.log_snr / -2).exp().tolist()):
        point = Discrete(schedule).at(ratio)
        assert type(point.time) is int  # a network is told whole timesteps as such
        assert point.time == t
        assert point.alpha == pytest.approx(float(schedule.sqrt_alphas_cumprod[t]), rel=1e-9)
        assert point.sigma == pytest.approx(float(schedule.sqrt_one_minus_alphas_cumprod[t]), rel=1e-9)


@given(st.integers(0, 998), st.floats(0.01, 0.99))
def test_a_ratio_between_two_timesteps(t: int, share: float) -> None:
    levels = LINEAR.schedule.log_snr / -2
    ratio = float(torch.lerp(levels[t], levels[t + 1], share).exp())
    point = LINEAR.at(ratio)
    assert point.time == pytest.approx(t + share, abs=1e-8)
    assert point.ratio == pytest.approx(ratio, rel=1e-12)
    assert point.alpha**2 + point.sigma**2 == pytest.approx(1, rel=1e-12)


@given(st.floats(0.0001, 0.0099) | st.floats(158, 1e4))
def test_a_ratio_past_the_ends_is_told_as_the_end(ratio: float) -> None:
    point = LINEAR.at(ratio)
    assert point.time == (0 if ratio < 1 else 999)
    assert point.ratio == pytest.approx(ratio, rel=1e-12)  # the rates themselves are what was asked for


@given(random_betas, st.lists(st.floats(-8, 8), min_size=1, max_size=20))
def test_the_nearest_timestep_of_a_ratio(betas: list[float], wanted: list[float]) -> None:
    process = Discrete(NoiseSchedule(betas))
    log_ratios = column(*wanted)
    times = process.from_log_ratio(log_ratios)
    assert times.dtype == torch.int64
    distances = (process.schedule.log_snr / -2 - log_ratios.view(-1, 1)).abs()
    chosen = distances.gather(1, times.view(-1, 1)).flatten()
    torch.testing.assert_close(chosen, distances.min(1).values, rtol=0, atol=1e-12)


def test_the_nearest_timestep_with_zero_terminal_snr() -> None:
    process = Discrete(make_schedule("linear", 100, zero_snr=True))
    assert process.from_log_ratio(column(-20, 30)).tolist() == [0, 98]  # the last one's is infinite
    assert process.ends_in_noise
    assert not LINEAR.ends_in_noise


@given(random_betas, st.floats(0, 1, exclude_max=True))
def test_a_fraction_of_the_timesteps(betas: list[float], fraction: float) -> None:
    process = Discrete(NoiseSchedule(betas))
    (time,) = process.from_fraction(column(fraction)).tolist()
    assert time == min(int(fraction * len(betas)), len(betas) - 1)


@pytest.mark.parametrize("num", [1, 2, 3, 1000, 1023, 1024, 1025, 65537, 999_999, 1_000_000])
def test_the_largest_fraction_is_the_last_timestep(num: int) -> None:
    largest = torch.tensor([1 - 2.0**-24])  # of those that are drawn; times `num` it must not be rounded up
    assert Discrete(make_schedule("linear", num)).from_fraction(largest).tolist() == [num - 1]


def test_karras_spacing_of_timesteps() -> None:
    points = LINEAR.points(10, "karras", 7.0)
    sigmas = karras_sigmas(10, 0.0100005000375, 157.40728081)
    assert [p.ratio for p in points] == pytest.approx(sigmas, rel=1e-9)
    assert (points[0].time, points[-1].time) == (999, 0)
    assert all(p.alpha**2 + p.sigma**2 == pytest.approx(1, rel=1e-12) for p in points)
    assert [p.time for p in points] == sorted((p.time for p in points), reverse=True)
    single = Discrete(NoiseSchedule([0.5])).points(1, "karras", 7.0)
    assert single[0].time == 0
    assert single[0].ratio == pytest.approx(1)


# Flow


def test_shift() -> None:
    shifted = Flow(3.0).shifted(column(0.25, 0.5, 0.9)).tolist()
    assert shifted == pytest.approx([0.5, 0.75, 0.9642857143], rel=1e-9)


@given(st.floats(0, 1), st.floats(0.1, 10))
def test_shift_is_undone_by_its_inverse(t: float, k: float) -> None:
    assert float(Flow(1.0).shifted(column(t))) == t
    assert float(Flow(1 / k).shifted(Flow(k).shifted(column(t)))) == pytest.approx(t, rel=1e-9, abs=1e-15)


@given(st.floats(0.001, 0.999), st.floats(0.1, 10))
def test_shift_multiplies_the_ratio(t: float, k: float) -> None:
    process = Flow(k)
    (shifted,) = process.from_fraction(column(t)).tolist()
    assert shifted / (1 - shifted) == pytest.approx(k * t / (1 - t), rel=1e-9)
    point = process.at(shifted / (1 - shifted))
    assert (point.alpha, point.sigma) == pytest.approx((1 - shifted, shifted), rel=1e-9)


@given(st.floats(0.01, 0.99))
def test_flow_is_the_variance_exploding_process_seen_through_a_scale(t: float) -> None:
    alpha, sigma, log_snr = Flow().rates(column(t), 1)
    assert float(sigma) == t
    assert float(alpha) == 1 - t
    ratio = t / (1 - t)  # the sigma of EDM
    assert Flow().at(ratio).ratio == pytest.approx(ratio, rel=1e-9)
    assert float(log_snr.exp()) == pytest.approx(((1 - t) / t) ** 2, rel=1e-9)
    found = Flow().from_log_ratio(column(log(ratio)))
    assert float(found) == pytest.approx(t, rel=1e-9)


def test_points_of_the_flow() -> None:
    points = Flow(3.0, time_scale=10.0).points(4, "trailing", 7.0)
    assert [p.sigma for p in points] == pytest.approx([1, 0.9, 0.75, 0.5], rel=1e-12)
    assert [p.alpha for p in points] == pytest.approx([0, 0.1, 0.25, 0.5], abs=1e-12)
    assert [p.time for p in points] == pytest.approx([10, 9, 7.5, 5], rel=1e-12)
    assert points[0].ratio == inf
    assert points[0].alpha == 0


# All


PROCESSES: dict[str, Process] = {"discrete": LINEAR, "flow": Flow(), "exploding": VarianceExploding()}


@pytest.mark.parametrize("name", PROCESSES)
@given(ratio=ratios)
def test_what_a_sampler_is_told_is_what_training_told(name: str, ratio: float) -> None:
    """The rates and the time of a point are those that the same noise level has in a batch."""
    process = PROCESSES[name]
    times = process.from_log_ratio(column(log(ratio)))
    told, (alpha, sigma, log_snr) = process.network_time(times), process.rates(times, 4)
    point = process.at(float(sigma) / float(alpha))
    assert float(told) == pytest.approx(point.time, rel=1e-5, abs=1e-3)
    assert float(alpha) == pytest.approx(point.alpha, rel=1e-6)
    assert float(sigma) == pytest.approx(point.sigma, rel=1e-6)
    assert float(log_snr) == pytest.approx(-2 * log(point.ratio), rel=1e-5, abs=1e-5)
    assert alpha.shape == sigma.shape == log_snr.shape == (1, 1, 1, 1)
    if name != "discrete":
        assert point.ratio == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("name", PROCESSES)
@given(steps=st.integers(1, 60))
def test_points_lead_from_noise_to_the_image(name: str, steps: int) -> None:
    process = PROCESSES[name]
    for spacing in process.spacings:
        points = process.points(steps, spacing, 7.0)
        assert len(points) == steps
        levels = [p.ratio for p in points]
        assert levels == sorted(set(levels), reverse=True)
        assert levels[-1] > 0
        first = points[0]
        if spacing != "leading":
            assert first.sigma == pytest.approx(process.initial_scale, rel=1e-4)
            assert process.ends_in_noise == (first.alpha == 0)


def test_straight_processes_are_straight() -> None:
    for process in (Flow(), VarianceExploding()):
        times = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
        for rate in process.rates(times, 1)[:2]:
            torch.testing.assert_close(rate.diff().diff(), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
        assert process.straight
    assert not LINEAR.straight


def test_time_scale() -> None:
    assert Flow(time_scale=1.0).network_time(column(0.3)).tolist() == [0.3]
    assert Flow().network_time(column(0.3)).tolist() == [300]
    exploding = VarianceExploding(time_scale=1.0).network_time(column(0.002, 0.5, 1, 80)).tolist()
    assert exploding == pytest.approx([-1.553652025, -0.1732867951, 0, 1.095506659], rel=1e-9)
    timesteps = torch.tensor([0, 257, 999])
    assert LINEAR.network_time(timesteps) is timesteps
