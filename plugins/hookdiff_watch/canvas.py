"""Curves in braille characters, which have 2 x 4 dots each.

No library is used: plotext has 2.9 MB, and its version 6 replaced the interface of version 5. uniplot draws a frame,
for which small curves have no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
from attrs import define, field
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.text import Text

Array = NDArray[numpy.float64]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits in a character, by column and row
_LABEL = 9  # columns for the numbers beside a curve


@define(frozen=True, eq=False)
class DottedCurve:
    """The values of a name by step, and the style of their dots."""

    steps: Array
    values: Array
    style: str

    @classmethod
    def of(cls, values: dict[int, float], style: str) -> DottedCurve:
        """Return the curve of the values that are finite."""
        steps = sorted(values)
        x, y = numpy.array(steps, float), numpy.array([values[step] for step in steps], float)
        is_finite = numpy.isfinite(y)
        return cls(x[is_finite], y[is_finite], style)


@define(eq=False)
class _Canvas:
    width: int  # in characters
    height: int
    cells: dict[tuple[int, int], tuple[int, str]] = field(init=False, factory=dict)  # bits and style, by row and column

    def draw(self, columns: Array, rows: Array, style: str) -> None:
        """Draw a curve over the earlier ones; columns and rows (0 at the bottom) are in [0, 1], and columns rise."""
        across, down = 2 * self.width, 4 * self.height
        x = numpy.rint(columns * (across - 1)).astype(int)
        y = numpy.rint((1 - rows) * (down - 1)).astype(int)
        starts = numpy.flatnonzero(numpy.diff(x, prepend=-1))
        every = numpy.arange(x[0], x[-1] + 1)  # many points in a column give a range; columns without a point, a line
        low, high = (
            numpy.rint(numpy.interp(every, x[starts], extreme.reduceat(y, starts))).astype(int)
            for extreme in (numpy.minimum, numpy.maximum)
        )
        new: dict[tuple[int, int], int] = {}
        for k, column in enumerate(every.tolist()):
            top, bottom = int(low[k]), int(high[k])
            if k:  # join this column with the one before
                top, bottom = min(top, int(high[k - 1]) + 1), max(bottom, int(low[k - 1]) - 1)
            for row in range(top, bottom + 1):
                cell = row // 4, column // 2
                new[cell] = new.get(cell, 0) | _DOTS[column % 2][row % 4]
        self.cells |= {cell: (bits, style) for cell, bits in new.items()}

    def line(self, row: int) -> Text:
        from rich.text import Text

        text = Text()
        for column in range(self.width):
            bits, style = self.cells.get((row, column), (0, ""))
            text.append(chr(0x2800 + bits) if bits else " ", style)
        return text


def chart(
    heading: Text, curves: Sequence[DottedCurve], width: int, height: int, *, is_log: bool, with_axis: bool
) -> list[Text]:
    """Return `height` lines: the heading, the curves with their lowest and highest value, and an axis of steps.

    The last curve is drawn over the others. The scale is logarithmic if all values are positive and `is_log` is true.
    """
    from rich.text import Text

    curves = [curve for curve in curves if len(curve.steps)]
    canvas = _Canvas(max(1, width - _LABEL), max(1, height - 1 - with_axis))
    if not curves:
        return [heading, *[Text()] * (height - 1)]
    lowest, highest = (find([find(curve.values) for curve in curves]) for find in (min, max))
    first, last = (find([find(curve.steps) for curve in curves]) for find in (min, max))
    is_log = is_log and lowest > 0
    for curve in curves:
        columns = _scaled(curve.steps, first, last, False)
        canvas.draw(columns, _scaled(curve.values, lowest, highest, is_log), curve.style)
    lines = [heading]
    numbers = {0: highest, canvas.height - 1: lowest} if lowest < highest else {canvas.height // 2: lowest}
    for row in range(canvas.height):
        label = f"{numbers[row]:.3g}" if row in numbers else ""
        lines.append(Text.assemble((f"{label:>{_LABEL - 1}} ", "dim"), canvas.line(row)))
    if with_axis:
        begin, end = f"{first:.0f}", f"{last:.0f}" if last > first else ""
        room = max(1, canvas.width - len(begin) - len(end))
        scale = "log scale" if is_log and room > len("log scale") else ""
        lines.append(Text(f"{'':{_LABEL}}{begin}{scale:^{room}}{end}", "dim"))
    return lines


def _scaled(values: Array, low: float, high: float, is_log: bool) -> Array:
    """Return the place of each value between `low` and `high`, from 0 to 1; 0.5 if they are equal."""
    if is_log:
        values, low, high = numpy.log10(values), float(numpy.log10(low)), float(numpy.log10(high))
    size = high / 2 - low / 2  # halved first, so that the difference cannot overflow
    return (values / 2 - low / 2) / size if size > 0 else numpy.full(len(values), 0.5)
