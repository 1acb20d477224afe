"""Reduces the number of points of a curve, without losing a spike."""

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]


def thin_curve(x: Array, y: Array, most: int) -> tuple[Array, Array]:
    """Return at most `most` points of a curve: the lowest and the highest in each of its equally long parts.

    The first and the last point are kept. A part without a finite value keeps one point, so that the curve has a gap.

    Args:
        x: the x of each point.
        y: the y of each point.
        most: number of points to keep, at least 4.
    """
    if len(x) <= most:
        return x, y
    places = {0, len(x) - 1}
    for part in numpy.array_split(numpy.arange(1, len(x) - 1), most // 2 - 1):
        finite = part[numpy.isfinite(y[part])]
        places |= {finite[y[finite].argmin()], finite[y[finite].argmax()]} if len(finite) else {part[0]}
    chosen = sorted(places)
    return x[chosen], y[chosen]
