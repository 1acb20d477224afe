from math import inf, log, sqrt

import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff.diffusion import EDM, IMAGE, VP, Cosine, Flow, Linear, Process
from tests.conftest import refused
from tests.diffusion.conftest import column, random_betas, vp

LINEAR = VP("linear")
ratios = st.floats(0.02, 100)


# VP: timesteps


@given(random_betas, st.data())
def test_points_have_the_rates_of_the_tables(betas: list[float], data: st.DataObject) -> None:
    process = vp(betas)
    timesteps = data.draw(st.lists(st.integers(0, len(betas) - 1), max_size=len(betas)))
    for point, t in zip(process.at_timesteps(timesteps), timesteps, strict=True):
        assert (type(point.time), point.time) == (int, t)
        assert point.alpha == pytest.approx(float(process.tables.sqrt_alphas_cumprod[t]), rel=1e-15)
        assert point.sigma == pytest.approx(float(process.tables.sqrt_one_minus_alphas_cumprod[t]), rel=1e-15)


@given(random_betas)
def test_a_ratio_leads_back_to_its_timestep(betas: list[float]) -> None:
    process = vp(betas)
    for t, ratio in enumerate((process.tables.log_snr / -2).exp().tolist()):
        point = process.at(ratio)
        assert (type(point.time), point.time) == (int, t)  # the network gets whole timesteps as integers
        assert point.alpha == pytest.approx(float(process.tables.sqrt_alphas_cumprod[t]), rel=1e-9)
        assert point.sigma == pytest.approx(float(process.tables.sqrt_one_minus_alphas_cumprod[t]), rel=1e-9)


@given(st.integers(0, 998), st.floats(0.01, 0.99))
def test_a_ratio_between_two_timesteps(t: int, share: float) -> None:
    levels = LINEAR.tables.log_snr / -2
    ratio = float(torch.lerp(levels[t], levels[t + 1], share).exp())
    point = LINEAR.at(ratio)
    assert point.time == pytest.approx(t + share, abs=1e-8)
    assert (point.ratio, point.alpha**2 + point.sigma**2) == pytest.approx((ratio, 1), rel=1e-12)


@given(st.floats(0.0001, 0.0099) | st.floats(158, 1e4))
def test_a_ratio_past_the_ends_has_the_time_of_the_end(ratio: float) -> None:
    point = LINEAR.at(ratio)
    assert point.time == (0 if ratio < 1 else 999)
    assert point.ratio == pytest.approx(ratio, rel=1e-12)  # the rates are not rounded to a timestep


@given(random_betas, st.lists(st.floats(-8, 8), min_size=1, max_size=20))
def test_the_nearest_timestep_of_a_ratio(betas: list[float], wanted: list[float]) -> None:
    process = vp(betas)
    log_ratios = column(*wanted)
    times = process.from_log_ratio(log_ratios)
    assert times.dtype == torch.int64
    distances = (process.tables.log_snr / -2 - log_ratios.view(-1, 1)).abs()
    chosen = distances.gather(1, times.view(-1, 1)).flatten()
    torch.testing.assert_close(chosen, distances.min(1).values, rtol=0, atol=1e-12)


def test_the_nearest_timestep_with_zero_terminal_snr() -> None:
    process = VP(timesteps=100, rescale_betas_zero_snr=True)
    assert process.from_log_ratio(column(-20, 30)).tolist() == [0, 98]  # the last timestep has an infinite ratio
    assert (process.ends_in_noise, LINEAR.ends_in_noise) == (True, False)


@given(random_betas, st.floats(0, 1, exclude_max=True))
def test_a_fraction_of_the_timesteps(betas: list[float], fraction: float) -> None:
    process = vp(betas)
    (time,) = process.from_fraction(column(fraction)).tolist()
    assert time == min(int(fraction * len(betas)), len(betas) - 1)


@pytest.mark.parametrize("num", [1, 2, 3, 1000, 1023, 1024, 1025, 65537, 999_999, 1_000_000])
def test_the_largest_fraction_is_the_last_timestep(num: int) -> None:
    largest = torch.tensor([1 - 2.0**-24])  # of all drawn fractions; times `num`, it must not round up
    assert VP("cosine", num).from_fraction(largest).tolist() == [num - 1]


@given(random_betas)
def test_the_ratio_ranges_from_the_first_timestep_to_the_last(betas: list[float]) -> None:
    process = vp(betas)
    assert process.ratio_range == pytest.approx([process.at_timesteps([t])[0].ratio for t in (0, len(betas) - 1)])


def test_processes_with_the_same_options_are_equal() -> None:
    assert VP("cosine", 50) == VP("cosine", 50) != VP("cosine", 51)
    assert Flow(3.0) != Flow()
    assert len({VP(), VP(Cosine()), EDM(), EDM(sigma_max=80.0)}) == 2


@pytest.mark.parametrize("schedule", ["linear", "sigmoid"])
def test_betas_that_are_not_scaled_to_a_short_process_are_refused(schedule: str) -> None:
    """A share of x0 would be left in x_T, but sampling starts with pure noise."""
    left = float(VP(schedule, 400).tables.alphas_cumprod[-1])
    assert 0.01 < left < 0.05
    with refused(ValueError, "'timesteps'", 100, schedule, "36%", "'cosine'"):
        VP(schedule, 100)
    assert float(VP("cosine", 100).tables.alphas_cumprod[-1]) < 1e-6  # each of these avoids the error
    assert float(VP(Linear(beta_end=0.2), 100).tables.alphas_cumprod[-1]) < 1e-4
    assert float(VP(schedule, 100, rescale_betas_zero_snr=True).tables.alphas_cumprod[-1]) == 0


# Flow


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


sides = st.integers(1, 300)


@given(st.floats(0.001, 0.999), st.floats(0.1, 10), st.floats(0.5, 300), sides, sides)
def test_the_shift_follows_the_number_of_pixels(t: float, k: float, side: float, height: int, width: int) -> None:
    process = Flow(k, 10.0, shift_side=side)
    shaped = process.for_shape((3, height, width))
    ratio = sqrt(height * width) / side  # sqrt(m / n) in eq. 23 of Esser et al. 2024
    (t_n,), (t_m,) = (flow.from_fraction(column(t)).tolist() for flow in (Flow(k), shaped))
    assert t_m == pytest.approx(ratio * t_n / (1 + (ratio - 1) * t_n), rel=1e-9)
    (before, after) = (float(shaped.rates(column(time), 1)[2]) for time in (t_n, t_m))
    assert after == pytest.approx(before - log(height * width / side**2), rel=1e-7, abs=1e-7)  # a shift of the log-SNR
    assert shaped.for_shape((1, 2, 2)) is shaped
    # Only the choice of times depends on the shape.
    assert shaped.network_time(column(t_m)).tolist() == process.network_time(column(t_m)).tolist()
    assert shaped.at(0.5) == process.at(0.5)


@given(st.floats(0.1, 10), sides)
def test_the_shift_holds_for_squares_of_its_side(k: float, side: int) -> None:
    assert Flow(k, shift_side=side).for_shape((4, side, side)) == Flow(k)  # to the bit


def test_without_a_side_nothing_depends_on_the_shape() -> None:
    for process in (Flow(3.0), LINEAR, EDM()):
        for shape in ((3, 8, 24), (5,), ()):
            assert process.for_shape(shape) is process


@pytest.mark.parametrize("shape", [(), (5,), (8, 8), (3, 4, 8, 8)])
def test_a_side_needs_a_height_and_a_width(shape: tuple[int, ...]) -> None:
    with refused(ValueError, "'process.shift_side'", "c h w", str(shape)):
        Flow(shift_side=8).for_shape(shape)


@given(st.floats(0.01, 0.99))
def test_flow_is_a_scaled_variance_exploding_process(t: float) -> None:
    alpha, sigma, log_snr = Flow().rates(column(t), 1)
    assert (float(alpha), float(sigma)) == (1 - t, t)
    ratio = t / (1 - t)  # the sigma of EDM
    assert Flow().at(ratio).ratio == pytest.approx(ratio, rel=1e-9)
    assert float(log_snr.exp()) == pytest.approx(((1 - t) / t) ** 2, rel=1e-9)
    time = Flow().from_log_ratio(column(log(ratio)))
    assert float(time) == pytest.approx(t, rel=1e-9)


def test_points_of_the_flow() -> None:
    points = Flow(3.0, time_scale=10.0).trailing(4)
    assert [p.sigma for p in points] == pytest.approx([1, 0.9, 0.75, 0.5], rel=1e-12)
    assert [p.alpha for p in points] == pytest.approx([0, 0.1, 0.25, 0.5], abs=1e-12)
    assert [p.time for p in points] == pytest.approx([10, 9, 7.5, 5], rel=1e-12)
    assert (points[0].ratio, points[0].alpha) == (inf, 0)


# All


PROCESSES: dict[str, Process] = {"vp": LINEAR, "flow": Flow(), "edm": EDM()}


@pytest.mark.parametrize("name", PROCESSES)
@given(ratio=ratios)
def test_a_sampler_gives_the_network_the_time_of_training(name: str, ratio: float) -> None:
    """A point has the same rates and time as its noise level has in a training batch."""
    process = PROCESSES[name]
    times = process.from_log_ratio(column(log(ratio)))
    time, (alpha, sigma, log_snr) = process.network_time(times), process.rates(times, 4)
    point = process.at(float(sigma) / float(alpha))
    assert float(time) == pytest.approx(point.time, rel=1e-5, abs=1e-3)
    assert (float(alpha), float(sigma)) == pytest.approx((point.alpha, point.sigma), rel=1e-6)
    assert float(log_snr) == pytest.approx(-2 * log(point.ratio), rel=1e-5, abs=1e-5)
    assert alpha.shape == sigma.shape == log_snr.shape == (1, 1, 1, 1)
    if name != "vp":
        assert point.ratio == pytest.approx(ratio, rel=1e-9)


def test_straight_processes_are_straight() -> None:
    for process in (Flow(), EDM()):
        times = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
        for rate in process.rates(times, 1)[:2]:
            torch.testing.assert_close(rate.diff().diff(), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
        assert process.straight
    assert not LINEAR.straight


def test_time_scale() -> None:
    assert Flow(time_scale=1.0).network_time(column(0.3)).tolist() == [0.3]
    assert Flow().network_time(column(0.3)).tolist() == [300]
    of_edm = EDM(time_scale=1.0).network_time(column(0.002, 0.5, 1, 80)).tolist()
    assert of_edm == pytest.approx([-1.553652025, -0.1732867951, 0, 1.095506659], rel=1e-9)
    timesteps = torch.tensor([0, 257, 999])
    assert LINEAR.network_time(timesteps) is timesteps


@pytest.mark.parametrize("name", PROCESSES)
def test_known_ends_of_each_process(name: str) -> None:
    process = PROCESSES[name]
    low, high = process.ratio_range
    assert process.ends_in_noise == (high == inf) == (name == "flow")
    assert process.initial_scale == (80 if name == "edm" else 1)
    assert low == pytest.approx({"vp": 0.0100005000375, "flow": 0, "edm": 0.002}[name], rel=1e-9)
    assert min(high, 1e9) == pytest.approx({"vp": 157.40728081, "flow": 1e9, "edm": 80}[name], rel=1e-9)
    assert IMAGE.ratio == 0


def test_options_that_contradict_each_other_are_refused() -> None:
    with refused(ValueError, "timesteps", 2):
        VP("cosine", 1, rescale_betas_zero_snr=True)
    with refused(ValueError, "sigma_min", 90, 80, "sigma_max"):
        EDM(sigma_min=90.0)
