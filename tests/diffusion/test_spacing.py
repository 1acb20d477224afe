from math import inf, log

import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff.diffusion.process import EDM, VP, Flow, Process
from hookdiff.diffusion.spacing import Karras, Leading, Shifted, ShiftedBy, Spacing, Trailing, karras_sigmas
from tests.conftest import refused
from tests.diffusion.conftest import column, vp

LINEAR = VP("linear")
ZERO_SNR = VP("linear", rescale_betas_zero_snr=True)

KARRAS_18 = [
    80, 57.58598472, 40.7855738, 28.3745846, 19.35245298, 12.91008238, 8.400935309, 5.315194522, 3.25682152,
    1.923339837, 1.088170637, 0.5853481232, 0.2964422845, 0.1395164687, 0.05994731124, 0.02293451837, 0.007528019963,
    0.002,
]  # fmt: skip


def test_karras_sigmas() -> None:
    assert karras_sigmas(18, 0.002, 80) == pytest.approx(KARRAS_18, rel=1e-9)
    points = Karras().points(EDM(), 18)
    assert [p.sigma for p in points] == pytest.approx(KARRAS_18, rel=1e-9)
    assert {p.alpha for p in points} == {1.0}
    assert [p.time for p in points] == pytest.approx([250 * log(s) for s in KARRAS_18], rel=1e-8)


@given(st.integers(1, 50), st.floats(1e-4, 0.5), st.floats(1, 200), st.floats(0.5, 10))
def test_karras_sigmas_are_even_in_a_power(steps: int, low: float, high: float, rho: float) -> None:
    sigmas = karras_sigmas(steps, low, high, rho)
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (steps, high, low if steps > 1 else high)
    roots = column(*sigmas) ** (1 / rho)
    torch.testing.assert_close(roots.diff(), roots.diff().mean().expand(steps - 1) if steps > 1 else roots.diff())


def timesteps(spacing: Spacing, process: Process, steps: int) -> list[float]:
    return [point.time for point in spacing.points(process, steps)]


def test_timesteps() -> None:
    assert timesteps(Trailing(), LINEAR, 50) == list(range(999, 0, -20))
    assert timesteps(Leading(), LINEAR, 50) == list(range(980, -1, -20))
    assert timesteps(Leading(1), LINEAR, 50) == list(range(981, 0, -20))
    assert timesteps(Trailing(), LINEAR, 3) == [999, 666, 332]


@given(st.integers(1, 1500), st.sampled_from([Trailing(), Leading()]), st.data())
def test_timesteps_are_distinct_and_in_range(num: int, spacing: Spacing, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, num))
    visited = timesteps(spacing, VP("cosine", num), steps)
    assert len(visited) == steps
    assert visited == sorted(set(visited), reverse=True)
    assert visited[0] == num - 1 if spacing == Trailing() else visited[-1] == 0
    assert 0 <= visited[-1] <= visited[0] < num


def test_karras_spacing_of_timesteps() -> None:
    points = Karras().points(LINEAR, 10)
    sigmas = karras_sigmas(10, 0.0100005000375, 157.40728081)
    assert [p.ratio for p in points] == pytest.approx(sigmas, rel=1e-9)
    assert (points[0].time, points[-1].time) == (999, 0)
    assert all(p.alpha**2 + p.sigma**2 == pytest.approx(1, rel=1e-12) for p in points)
    assert [p.time for p in points] == sorted((p.time for p in points), reverse=True)
    single = Karras().points(vp([0.96]), 1)
    assert single[0].time == 0
    assert single[0].ratio == pytest.approx((0.96 / 0.04) ** 0.5)


def test_rho_sets_the_spacing_of_the_noise_levels() -> None:
    sigmas = [point.sigma for point in Karras(rho=1.0).points(EDM(1.0, 4.0), 4)]
    assert sigmas == pytest.approx([4, 3, 2, 1], rel=1e-12)
    assert [p.sigma for p in Karras(3.0).points(EDM(), 9)] == karras_sigmas(9, 0.002, 80.0, 3.0)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 30))
def test_shifted_is_trailing_of_a_flow_with_another_shift(trained: float, shift: float, steps: int) -> None:
    assert Shifted(shift).points(Flow(trained, 10.0), steps) == Trailing().points(Flow(shift, 10.0), steps)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 30))
def test_shifted_by_multiplies_the_shift_in_training(trained: float, factor: float, steps: int) -> None:
    expected = Shifted(factor * trained).points(Flow(), steps)
    assert ShiftedBy(factor).points(Flow(trained), steps) == expected
    sided = Flow(trained, shift_side=4)
    assert ShiftedBy(factor).points(sided.for_shape((1, 4, 4)), steps) == expected
    assert ShiftedBy(factor).points(sided.for_shape((1, 2, 32)), steps) == ShiftedBy(2 * factor).points(sided, steps)


FITTING: list[tuple[Spacing, Process]] = [
    *((spacing, process) for spacing in (Trailing(), Leading()) for process in (LINEAR, ZERO_SNR, VP("cosine", 60))),
    *((Karras(), process) for process in (LINEAR, VP("cosine", 60), EDM())),
    *((spacing, Flow(2.0)) for spacing in (Trailing(), Shifted(3.0), ShiftedBy())),
]


@pytest.mark.parametrize(("spacing", "process"), FITTING, ids=str)
@given(steps=st.integers(1, 60))
def test_points_lead_from_noise_to_the_image(spacing: Spacing, process: Process, steps: int) -> None:
    points = spacing.points(process, steps)
    assert len(points) == steps
    levels = [p.ratio for p in points]
    assert levels == sorted(set(levels), reverse=True)
    assert levels[-1] > 0
    if spacing != Leading():
        first = points[0]
        assert first.ratio == pytest.approx(process.ratio_range[1], rel=1e-6)
        assert process.ends_in_noise == (first.alpha == 0) == (first.ratio == inf)
        assert first.sigma == pytest.approx(process.initial_scale, rel=1e-4)


@pytest.mark.parametrize(
    ("spacing", "process", "facts"),
    [
        (Trailing(), EDM(), ["'spacing'", "'trailing'", "'edm'", "'karras'"]),
        (Leading(), EDM(), ["'spacing'", "'leading'", "'edm'"]),
        (Leading(), Flow(), ["'spacing'", "'leading'", "'flow'"]),
        (Karras(), Flow(), ["'spacing'", "'karras'", "'trailing'"]),
        (Karras(), ZERO_SNR, ["'spacing'", "'karras'", "'trailing'"]),
        (Shifted(3.0), LINEAR, ["'spacing'", "'shifted'", "'vp'", "'flow'"]),
        (Shifted(3.0), EDM(), ["'spacing'", "'shifted'", "'edm'", "'flow'"]),
        (ShiftedBy(), EDM(), ["'spacing'", "'shifted_by'", "'edm'", "'flow'"]),
        (Trailing(), VP("cosine", 10), ["'steps'", 50, "diffusion.process.timesteps", 10]),
        (Leading(20), LINEAR, ["'spacing.offset' = 20", "at most 19"]),
        (Leading(), VP("cosine", 10), ["'steps'", 50, "diffusion.process.timesteps", 10]),
    ],
)
def test_spacings_that_do_not_fit_the_process_are_refused(
    spacing: Spacing, process: Process, facts: list[object]
) -> None:
    with refused(ValueError, *facts):
        spacing.points(process, 50)
