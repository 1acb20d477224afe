"""Charts: ticks, labels, curves on their axes, and files."""

import numpy
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from hookdiff import UserError
from hookdiff.authors import Chart, draw_charts, draw_curves
from hookdiff.authors.chart import HEIGHT, WIDTH, Axis, tick_label, ticks

NUMBERS = st.floats(1e-12, 1e12)


@given(low=st.just(0.0) | NUMBERS.map(float.__neg__), high=NUMBERS, most=st.integers(1, 10))
def test_ticks_are_round_and_few(low, high, most):
    marks = ticks(low, high, most)
    assert len(marks) <= most + 1 + (low < 0)
    slack = 1e-6 * (high - low)
    assert (marks[0] <= low + slack, marks[-1] >= high - slack) == (True, True)
    assert f"{marks[-1] - marks[-2]:.3e}".partition("e")[0] in {"1.000", "2.000", "2.500", "5.000"}


@given(low=NUMBERS, times=st.floats(1.01, 1e20))
def test_any_logarithmic_axis_has_a_few_round_numbers(low, times):
    marks = Axis(low, low * times, is_log=True).marks(8)
    assert 2 <= len(marks) <= 14
    assert sorted(set(marks)) == marks
    assert (low * (1 - 1e-6) <= marks[0], marks[-1] <= low * times * (1 + 1e-6)) == (True, True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-05, "0.00001"), (2.5e-7, "0.00000025"), (1e-9, "1e-09"), (-1.5, "-1.5"), (1e6, "1,000,000")],
)
def test_labels_are_plain_numbers(value, text):
    assert tick_label(value) == text


def blue(path, top=0):
    """Return where the curve of the chart below `top` is: rows and columns, from left to right."""
    with Image.open(path) as picture:
        pixels = numpy.asarray(picture.convert("RGB"), int)[top + 36 : top + HEIGHT]
    columns, rows = (pixels[:, :, 2] - pixels[:, :, 0] > 100).T.nonzero()
    return rows, columns


def test_each_curve_has_a_panel_and_is_asked_for_its_own_steps(tmp_path):
    seen = set()
    curves = {"zero": lambda step: 0.0, "rising": lambda step: seen.add(step) or step / 50}
    draw_curves(curves, 50, tmp_path / "a" / "x.png")
    assert seen == set(range(51))
    with Image.open(tmp_path / "a" / "x.png") as picture:
        assert picture.size == (WIDTH, 2 * HEIGHT)
    flat, _ = blue(tmp_path / "a" / "x.png")
    rows, columns = blue(tmp_path / "a" / "x.png", HEIGHT)
    assert flat.max() - flat.min() <= 3
    assert numpy.corrcoef(rows, columns)[0, 1] < -0.999


@pytest.mark.parametrize("log", [False, True])
def test_a_power_of_x_is_straight_on_logarithmic_axes_alone(log, tmp_path):
    curve = [(x, x**-2) for x in numpy.geomspace(1e-3, 1, 100).tolist()]
    draw_charts([Chart(title="", x_label="", curve=curve, log_x=log, log_y=log)], tmp_path / "x.png")
    assert (numpy.corrcoef(blue(tmp_path / "x.png"))[0, 1] > 0.999) == log


@pytest.mark.parametrize("values", [(-20.0, -20.0), (-1.0, 3.0), (2.0, 2.0), (1.61, 1.64), (1.0, 1e9)])
def test_any_values_span_the_chart_and_higher_ones_are_at_its_upper_end(values, tmp_path):
    curve = list(zip((1.0, 3.0), values, strict=True))
    dots = [(2.0, max(values) + 5)]
    chart = Chart(title="", x_label="", curve=curve, dots=dots, highest=max(values), log_y=min(values) > 0)
    draw_charts([chart], tmp_path / "x.png")
    _, columns = blue(tmp_path / "x.png")
    assert columns[-1] - columns[0] > 780
    with Image.open(tmp_path / "x.png") as picture:
        red, _, blueness = picture.getpixel((round((columns[0] + columns[-1]) / 2), 44))
    assert 40 < blueness - red < 70  # a dot is pale


@pytest.mark.parametrize("name", ["x.format", "there/x.png"])
def test_a_file_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / "there").write_text("a file")
    with pytest.raises(UserError, match=name):
        draw_curves({"a": lambda step: 1.0}, 5, tmp_path / name)
