"""Curves over steps: ticks, panels and files."""

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from hookdiff import UserError
from hookdiff.authors.chart import HEIGHT, WIDTH, draw_curves, ticks


@given(highest=st.floats(1e-12, 1e12), most=st.integers(1, 10))
def test_ticks_are_round_and_few(highest, most):
    marks = ticks(highest, most)
    assert marks[0] == 0
    assert len(marks) <= most + 1
    assert marks[-1] >= highest * (1 - 1e-6)
    digits = {f"{(marks[1]):.3e}".partition("e")[0]}
    assert digits <= {"1.000", "2.000", "2.500", "5.000"}


def test_each_curve_has_a_panel_and_is_asked_for_its_own_steps(tmp_path):
    seen = set()
    curves = {"rising": lambda step: seen.add(step) or step / 50, "zero": lambda step: 0.0}
    draw_curves(curves, 50, tmp_path / "a" / "x.png")
    assert seen == set(range(51))
    with Image.open(tmp_path / "a" / "x.png") as picture:
        assert picture.size == (WIDTH, 2 * HEIGHT)
        upper = picture.convert("L").crop((91, 42, WIDTH - 24, HEIGHT - 46))
    dark = [(x, y) for x in (100, 400, 700) for y in range(upper.height) if upper.getpixel((x, y)) < 160]
    rows = [[y for x, y in dark if x == column] for column in (100, 400, 700)]
    assert min(rows[0]) > min(rows[1]) > min(rows[2])  # it rises


@pytest.mark.parametrize("name", ["x.format", "there/x.png"])
def test_a_file_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / "there").write_text("a file")
    with pytest.raises(UserError, match=name):
        draw_curves({"a": lambda step: 1.0}, 5, tmp_path / name)
