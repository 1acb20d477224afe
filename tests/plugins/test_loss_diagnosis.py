"""Findings on synthetic loss curves with known events."""

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator

import numpy
import pytest
from hypothesis import example, given, strategies as st

from hookdiff import Finding
from hookdiff.loop.saved import restore_state, state_of
from hookdiff_loss.diagnosis import Kind, LossTrends, period, trend
from hookdiff_loss.smoothing import Smoothed

NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal 0.1 %": lambda r: math.exp(r.gauss(0, 0.001)),
    "normal 2 %": lambda r: math.exp(r.gauss(0, 0.02)),
    "normal 10 %": lambda r: math.exp(r.gauss(0, 0.1)),
    "normal 60 %": lambda r: math.exp(r.gauss(0, 0.6)),
    "chi-square of 64": lambda r: r.gammavariate(32, 1),
    "chi-square of 4": lambda r: r.gammavariate(2, 1),
    "exponential": lambda r: r.expovariate(1),
    "uniform": lambda r: r.uniform(0.01, 1),
}


def noisy(levels: Iterable[float], seed: int = 0, noise: str = "normal 10 %") -> Iterator[float]:
    generator = random.Random(seed)
    return (level * NOISES[noise](generator) for level in levels)


def findings(losses: Iterable[float], diagnosis: LossTrends | None = None) -> list[tuple[int, Kind, Finding]]:
    """Return the findings, each with its update and its kind."""
    observe = (diagnosis or LossTrends()).observe
    steps = enumerate(losses, 1)
    return [(step, kind, finding) for step, loss in steps for kind, finding in observe(step, loss).items()]


def kinds(losses: Iterable[float], diagnosis: LossTrends | None = None) -> list[str]:
    return [kind for _, kind, _ in findings(losses, diagnosis)]


def began(finding: Finding) -> int:
    """Return the last update that the finding names: the one at which it began."""
    return int(re.findall(r" step (\d[\d,]*)", f"{finding.what} {finding.why}")[-1].replace(",", ""))


# False alarms


@given(st.integers(0, 10**6), st.sampled_from(list(NOISES)))
def test_stationary_noise_has_no_finding(seed: int, noise: str) -> None:
    assert kinds(noisy([1.0] * 3000, seed, noise), LossTrends(plateau=0)) == []


@pytest.mark.wide
@pytest.mark.parametrize("noise", ["normal 10 %", "chi-square of 4"])
def test_the_rate_of_false_alarms_is_below_one_in_a_hundred_thousand(noise: str) -> None:
    assert kinds(noisy([1.0] * 100_000, 1, noise), LossTrends(plateau=0)) == []


def test_heavy_tails_are_reported_less_and_less() -> None:
    generator = random.Random(0)
    curve = [math.exp(0.1 * (generator.expovariate(1) - generator.expovariate(1))) for _ in range(50_000)]  # Laplace
    seen = kinds(curve, LossTrends(plateau=0))
    assert set(seen) <= {"spike"}
    assert len(seen) <= 3  # of 50,000 updates that are each beyond 10 deviations with 17 chances in a million


@given(
    seed=st.integers(0, 10**6),
    noise=st.sampled_from(["normal 2 %", "normal 10 %", "chi-square of 64", "chi-square of 4"]),
    waits=st.integers(0, 400),
    pace=st.floats(3, 300),
    power=st.floats(0, 0.5),
)
def test_a_falling_curve_has_no_finding(seed: int, noise: str, waits: int, pace: float, power: float) -> None:
    # As in real runs: flat while the learning rate warms up, then fast, then slower and slower.
    steps = [max(0, step - waits) for step in range(2000)]
    levels = [0.1 * (1 + step) ** -power + 0.9 * math.exp(-step / pace) for step in steps]
    assert kinds(noisy(levels, seed, noise), LossTrends(plateau=0)) == []


def test_an_easy_batch_has_no_finding() -> None:
    curve = list(noisy([1.0] * 1000))
    curve[500] = 0.01
    assert kinds(curve) == []


# Spikes and drops


def test_a_spike_is_reported_once_with_its_step_and_size() -> None:
    curve = list(noisy([1.0] * 1000))
    curve[499] = 5.0
    ((step, kind, finding),) = findings(curve)
    assert (step, kind, finding.severity, began(finding)) == (501, "spike", "warning", 500)
    assert finding.why.startswith("5, ")
    deviations = int(finding.why.split(" and ")[1].split()[0])
    assert deviations == pytest.approx(math.log(5) / 0.1, rel=0.25)


def test_a_spike_may_last() -> None:
    curve = list(noisy([1.0] * 500 + [6.0] * 15 + [1.0] * 500))
    ((step, kind, finding),) = findings(curve)
    assert (step, kind, began(finding)) == (516, "spike", 501)
    assert "for 15 updates" in finding.why


def test_of_many_spikes_fewer_and_fewer_are_reported() -> None:
    curve = list(noisy([1.0] * 6000))
    for k in range(40):
        curve[200 + 140 * k] = 10.0  # the window has forgotten the one before
    diagnosis = LossTrends(plateau=0)
    reported = findings(curve, diagnosis)
    assert [began(finding) for *_, finding in reported] == [201 + 140 * k for k in (0, 1, 3, 7, 15, 31)]
    assert "spike 32 " in reported[-1][2].why
    assert diagnosis.num_spikes == 40


def test_the_threshold_is_in_deviations() -> None:
    curve = list(noisy([1.0] * 1000, noise="normal 2 %"))
    curve[499] = 1.6  # 23 deviations
    assert kinds(curve, LossTrends(spike=15)) == ["spike"]
    assert kinds(curve, LossTrends(spike=35)) == []


def test_a_drop_that_stays_is_reported_and_the_new_level_is_usual() -> None:
    ((step, kind, finding),) = findings(noisy([1.0] * 500 + [0.1] * 800))
    assert (step, kind, finding.severity, began(finding)) == (520, "drop", "warning", 501)
    assert finding.why.startswith("0.1")  # the median of the drop is a little above 0.1


# Divergence


@given(st.integers(0, 10**6), st.floats(1.01, 1.2))
def test_a_loss_that_grows_diverges(seed: int, growth: float) -> None:
    levels = [1.0] * 600 + [min(1e6, growth**k) for k in range(600)]
    reported = findings(noisy(levels, seed), LossTrends(plateau=0))
    (step, _, first) = reported[0]
    assert began(first) <= 600
    assert {kind for _, kind, _ in reported} == {"divergence"}
    # It is reported before it has grown by much, or three levels of ten updates after it.
    assert growth ** (step - 600) < 5 or step <= 640


@given(st.integers(0, 10**6), st.sampled_from([3.0, 10.0, 1e4]))
def test_a_loss_that_jumps_and_stays_diverges(seed: int, factor: float) -> None:
    ((step, kind, finding),) = findings(noisy([1.0] * 505 + [factor] * 300, seed), LossTrends(plateau=0))
    assert kind == "divergence"
    assert 525 < step <= 540
    assert f" at step {step}, " in finding.why


def test_a_slow_rise_under_much_noise_is_found_by_the_long_levels() -> None:
    levels = [1.0] * 2000 + [2.5] * 2000
    reported = findings(noisy(levels, noise="normal 60 %"), LossTrends(plateau=0))
    assert [step for step, *_ in reported] == [2300]


@given(st.integers(0, 10**6), st.floats(5, 1e6))
def test_a_network_that_is_ruined_by_its_first_updates_diverges(seed: int, factor: float) -> None:
    levels = [1.0] + [factor * math.exp(-k / 100) for k in range(140)]
    ((step, kind, finding),) = findings(noisy(levels, seed), LossTrends(plateau=0))
    assert (step, kind, began(finding)) == (30, "divergence", 1)


def test_a_smaller_ruin_is_found_if_a_constant_prediction_would_be_better() -> None:
    curve = list(noisy([1.0] + [1.6] * 100))
    for nothing, expected in ((False, []), (True, [(30, "divergence")])):
        observe = LossTrends().observe
        reported = [(step, kind) for step, loss in enumerate(curve, 1) for kind in observe(step, loss, nothing)]
        assert reported == expected


def test_a_ruin_is_found_though_the_loss_is_back_before_the_log_that_shows_it() -> None:
    diagnosis, reported = LossTrends(), list[tuple[int, str, int]]()
    for step, loss in enumerate(noisy([1.0, 0.9] + [30.0] * 40 + [1.0] * 100), 1):
        for kind, finding in diagnosis.observe(step, loss, worse_than_nothing=50 < step <= 100).items():
            reported.append((step, kind, int(re.findall(r"at step (\d+)", finding.why)[0])))
    assert reported == [(60, "divergence", 40), (70, "recovery", 70)]  # once


def test_a_poor_start_is_not_a_divergence() -> None:
    for levels in ([1.0] * 100, [1.0 * math.exp(-k / 50) for k in range(200)]):
        diagnosis = LossTrends()
        for step, loss in enumerate(noisy(levels, noise="normal 2 %"), 1):
            assert diagnosis.observe(step, loss, worse_than_nothing=True) == {}


def test_it_is_reported_again_only_when_it_has_become_much_worse() -> None:
    levels = [1.0] * 300 + [3.0] * 500 + [30.0] * 500 + [1.0] * 500 + [3.0] * 300
    reported = findings(noisy(levels), LossTrends(plateau=0))
    assert [kind for _, kind, _ in reported] == ["divergence"] * 2 + ["recovery", "divergence"]
    assert [step // 100 for step, *_ in reported] == [3, 8, 13, 18]
    assert [finding.severity for *_, finding in reported] == ["warning"] * 2 + ["info", "warning"]


def test_a_divergence_under_way_is_found_at_the_end() -> None:
    diagnosis = LossTrends()
    assert findings([*noisy([1.0] * 300), 4.0, 90.0, 1e5], diagnosis) == []
    finding = diagnosis.conclude(303)["divergence"]
    assert "1e+05 at step 303, " in finding.why
    assert began(finding) == 300
    assert diagnosis.conclude(304) == {}  # once

    early = LossTrends()
    assert findings([1.0, 1.1, 0.9] * 4 + [40.0, 1e3, 1e5], early) == []
    assert list(early.conclude(15)) == ["divergence"]
    calm = LossTrends()
    findings(noisy([1.0] * 300), calm)
    assert calm.conclude(300) == {}
    assert LossTrends().conclude(0) == {}


# Plateaus


def test_a_plateau_is_reported_once_and_again_after_the_loss_has_fallen() -> None:
    levels = [math.exp(-k / 500) for k in range(1500)]
    levels += [levels[-1]] * 4000 + [levels[-1] * math.exp(-k / 500) for k in range(700)]
    levels += [levels[-1]] * 4000
    reported = findings(noisy(levels))
    assert [(kind, finding.severity) for _, kind, finding in reported] == [("plateau", "info")] * 2
    assert 3500 <= reported[0][0] <= 3900
    assert 8200 <= reported[1][0] <= 8700
    assert [step - began(finding) for step, _, finding in reported] == [2000] * 2


@pytest.mark.wide
@given(st.integers(0, 10**6))
def test_a_loss_that_still_falls_is_not_on_a_plateau(seed: int) -> None:
    levels = [math.exp(-k / 20_000) for k in range(4000)]  # by a tenth in 2000 updates
    assert kinds(noisy(levels, seed)) == []


def test_too_much_noise_hides_a_plateau() -> None:
    assert kinds(noisy([1.0] * 4000, noise="normal 60 %"), LossTrends(plateau=1000)) == []


# Oscillation


@given(st.integers(0, 10**6), st.integers(2, 20), st.floats(0.2, 1))
@example(0, 14, 1.0)  # the medians of 100 updates differ, since 14 does not divide 100
def test_a_swing_is_reported_once_with_its_period_and_size(seed: int, updates: int, swing: float) -> None:
    levels = [math.exp(swing * math.cos(2 * math.pi * k / updates)) for k in range(1000)]
    ((_, kind, finding),) = findings(noisy(levels, seed, "normal 2 %"), LossTrends(plateau=0))
    assert (kind, finding.severity) == ("oscillation", "warning")
    size, period = map(int, re.findall(r"\d+", finding.why))
    assert period % updates == 0
    expected = swing * (math.sqrt(2) if updates == 2 else 1)  # the root mean square of a square wave is its height
    assert size / 100 == pytest.approx(expected, rel=0.1)


# What holds for all


@given(st.integers(0, 10**6), st.floats(-12, 12))
def test_the_scale_of_the_loss_has_no_effect(seed: int, exponent: float) -> None:
    levels = [math.exp(-k / 100) + 0.1 for k in range(600)] + [2.0] * 6 + [0.1] * 300 + [0.5] * 200 + [0.1] * 300
    curve = list(noisy(levels, seed))
    plain = [(step, kind, began(finding)) for step, kind, finding in findings(curve)]
    scaled = [(step, kind, began(finding)) for step, kind, finding in findings(loss * 10**exponent for loss in curve)]
    assert plain == scaled
    assert {kind for _, kind, _ in plain} == {"spike", "divergence", "recovery"}


@given(st.integers(0, 10**6), st.integers(1, 1500))
def test_it_goes_on_where_it_was_saved(seed: int, cut: int) -> None:
    levels = [1.0] * 600 + [9.0] * 7 + [1.0] * 300 + [5.0] * 100 + [0.2] * 500
    curve = list(noisy(levels, seed))
    whole, first, second = LossTrends(), LossTrends(), LossTrends()
    expected = [whole.observe(step, loss) for step, loss in enumerate(curve, 1)]
    before = [first.observe(step, loss) for step, loss in enumerate(curve[:cut], 1)]
    restore_state(second, json.loads(json.dumps(state_of(first))))
    restore_state(second.alarms, json.loads(json.dumps(state_of(first.alarms))))
    after = [second.observe(step, loss) for step, loss in enumerate(curve[cut:], cut + 1)]
    assert before + after == expected
    assert state_of(second) == state_of(whole)
    assert state_of(second.alarms) == state_of(whole.alarms)


def test_a_saved_state_is_a_copy() -> None:
    diagnosis = LossTrends()
    findings(noisy([1.0] * 250), diagnosis)
    state = state_of(diagnosis)
    text = json.dumps(state)
    for step, loss in enumerate(noisy([1.0] * 50, 1), 251):
        diagnosis.observe(step, loss)
    assert json.dumps(state) == text
    again = LossTrends()
    restore_state(again, state)
    findings(noisy([1.0] * 50, 1), again)
    assert json.dumps(state) == text


def test_a_negative_loss_is_not_judged() -> None:
    assert kinds([1.0] * 200 + [-1.0] + [100.0] * 200) == []


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=40))
def test_trend_is_that_of_least_squares(values: list[float]) -> None:
    num = len(values)
    design = numpy.stack([numpy.ones(num), numpy.arange(num)], 1)
    (_, slope), *_ = numpy.linalg.lstsq(design, numpy.array(values))
    left = numpy.array(values) - design @ numpy.linalg.lstsq(design, numpy.array(values))[0]
    error = math.sqrt(left @ left / (num - 2) * numpy.linalg.inv(design.T @ design)[1, 1])
    assert trend(values) == pytest.approx((slope * (num - 1), error * (num - 1)), rel=1e-6, abs=1e-9)


def test_a_straight_line_and_a_constant_have_no_period() -> None:
    assert period([float(k) for k in range(100)]) is None
    assert period([1.0] * 100) is None
    assert period([1.0, 2.0] * 50) == (2, pytest.approx(math.sqrt(0.5), rel=0.01))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.floats(0, 0.999), st.integers(0, 59))
def test_smoothing_is_a_weighted_mean(values: list[float], decay: float, cut: int) -> None:
    smoothed = Smoothed(decay)
    for index, value in enumerate(values):
        if index == cut:
            restore_state(smoothed, json.loads(json.dumps(state_of(smoothed))))
        smoothed.add(value)
    weights = decay ** numpy.arange(len(values))[::-1]
    mean = numpy.average(values, weights=weights)
    variance = numpy.average((numpy.array(values) - mean) ** 2, weights=weights)
    assert smoothed.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert smoothed.deviation == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-6)
