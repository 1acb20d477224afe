import math

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff.log.distribution import Distribution


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.integers(1, 70))
def test_counts_and_edges_are_those_of_numpy(values: list[float], bins: int) -> None:
    histogram = Distribution.of(torch.tensor(values), bins)
    assert sum(histogram.counts) == len(values)
    assert len(histogram.edges) == len(histogram.counts) + 1 == bins + 1
    assert histogram.low <= min(values) <= max(values) <= histogram.high
    counts, edges = numpy.histogram(numpy.array(values), bins, (histogram.low, histogram.high))
    assert histogram.edges == pytest.approx(edges.tolist())
    # A value on an edge may be counted on either side of it.
    assert numpy.abs(numpy.cumsum(counts) - numpy.cumsum(histogram.counts)).max() <= sum(
        any(math.isclose(value, edge, rel_tol=1e-5, abs_tol=1e-5 * (histogram.high - histogram.low)) for edge in edges)
        for value in values
    )


def test_values_that_are_not_finite_are_counted_apart() -> None:
    histogram = Distribution.of(torch.tensor([[math.nan, 1.0], [math.inf, 3.0]], dtype=torch.bfloat16))
    assert (histogram.low, histogram.high, sum(histogram.counts), histogram.nonfinite) == (1, 3, 2, 2)
    nothing = Distribution.of(torch.tensor([math.nan]))
    assert (sum(nothing.counts), nothing.nonfinite) == (0, 1)
    assert Distribution.of(torch.empty(0)).nonfinite == 0


def test_the_range_may_be_wider_than_float32() -> None:
    wide = Distribution.of(torch.tensor([-3e38, 3e38]))
    assert (sum(wide.counts), wide.counts[0], wide.counts[-1]) == (2, 1, 1)
    assert (wide.low, wide.high) == pytest.approx((-3e38, 3e38))
    double = Distribution.of(torch.tensor([1.0, 1e300], dtype=torch.float64))
    assert (sum(double.counts), double.high, double.nonfinite) == (2, 1e300, 0)


def test_equal_values_have_a_range_around_them() -> None:
    histogram = Distribution.of(torch.full((7,), 2.0))
    assert histogram.low < 2 < histogram.high
    assert max(histogram.counts) == 7
