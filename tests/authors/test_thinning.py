"""Curves with fewer points."""

import numpy
from hypothesis import given, strategies as st

from hookdiff.authors import thin_curve

CURVE = st.lists(st.floats(width=32), min_size=1, max_size=200)


@given(CURVE, st.integers(4, 50))
def test_thinning_keeps_the_lowest_the_highest_and_both_ends(values: list[float], most: int) -> None:
    y = numpy.array(values)
    steps, kept = thin_curve(numpy.arange(len(y), dtype=float), y, most)
    assert len(steps) <= most
    assert (numpy.diff(steps) > 0).all()
    numpy.testing.assert_array_equal(y[steps.astype(int)], kept)
    assert (steps[0], steps[-1]) == (0, len(y) - 1)
    finite = y[numpy.isfinite(y)]
    if len(finite):
        assert (finite.min(), finite.max()) == (kept[numpy.isfinite(kept)].min(), kept[numpy.isfinite(kept)].max())
