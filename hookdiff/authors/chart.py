"""Draws charts with Pillow: curves and points on axes with round numbers, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import frozen
from PIL import Image, ImageDraw, ImageFont

from hookdiff.disk.files import new_file
from hookdiff.disk.paths import check_writable
from hookdiff.errors import UserError

WIDTH, HEIGHT = 900, 300  # of a chart, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 24, 44, 44  # margins
_SCALE = 4  # the picture is drawn larger and then shrunk, so that lines are smooth
_INK, _FAINT, _DOT, _PAPER = "#222222", "#dddddd", "#9db8d6", "white"
_COLOURS = ("#1f5fa8", "#2b7f3f", "#b5471b", "#7a3e9d")  # of the curve, then of the marks

Points = Sequence[tuple[float, float]]


@frozen(kw_only=True)
class Chart:
    """A curve on axes, with a title. The legend lists the curve, the dots and the marks that have names."""

    title: str
    x_label: str
    curve: Points  # in rising order of x
    name: str = ""  # of the curve, in the legend
    dots: Points = ()  # points behind the curve, with x between its ends
    dots_name: str = ""
    marks: Mapping[str, float] = {}  # x of up to 3 vertical lines, by name
    highest: float = math.inf  # larger y do not extend the y axis: those beyond its end are drawn at the end
    log_x: bool = False  # whether the x axis is logarithmic; then all x are above 0
    log_y: bool = False  # whether the y axis is logarithmic; then all y are above 0
    height: int = HEIGHT


def draw_charts(charts: Sequence[Chart], path: Path) -> None:
    """Write a picture of charts, one below the other.

    Args:
        charts: at least one.
        path: file to write; its suffix gives the format.

    Raises:
        UserError: if the file cannot be written, or if its suffix is of no known picture format.
    """
    check_picture(path)
    height, top = sum(chart.height for chart in charts), 0
    picture = Image.new("RGB", (WIDTH * _SCALE, height * _SCALE), _PAPER)
    for chart in charts:
        _draw(chart, ImageDraw.Draw(picture), top)
        top += chart.height
    try:
        with new_file(path) as partial:
            kind = Image.registered_extensions()[path.suffix.lower()]
            picture.resize((WIDTH, height), Image.Resampling.LANCZOS).save(partial, kind)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None


def draw_curves(curves: Mapping[str, Callable[[int], float]], last: int, path: Path) -> None:
    """Write a picture with a chart for each function of the step, such as a learning rate, from step 0 to `last`.

    Args:
        curves: the functions, by the title of their chart; their values are at least 0.
        last: the last step, at least 1.
        path: file to write; its suffix gives the format.

    Raises:
        UserError: see `draw_charts`.
    """
    # Draw every step, or four steps for each pixel if there are more.
    shown = sorted({round(k * last / (4 * WIDTH)) for k in range(4 * WIDTH + 1)})
    values = {title: [(step, curve(step)) for step in shown] for title, curve in curves.items()}
    draw_charts([Chart(title=title, x_label="step", curve=curve) for title, curve in values.items()], path)


def check_picture(path: Path) -> None:
    """Check that a picture can be written at `path`; the check writes nothing.

    Raises:
        UserError: if no picture can be written there.
    """
    check_writable(path)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise UserError(f"{path}: cannot be written; expected the name of a picture, such as {path.stem}.png")


@frozen
class Axis:
    """The range of an axis of a chart, from `low` to a larger `high`."""

    low: float
    high: float
    is_log: bool

    def share(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the low end, 1 at the high end."""
        low, high, at = map(math.log if self.is_log else float, (self.low, self.high, value))
        return (at - low) / (high - low)

    def marks(self, most: int) -> list[float]:
        """Return round numbers in the range of the axis: at least two, and at most `most` + 1 if it is linear."""
        marks = self._inside(_log_ticks(self.low, self.high)) if self.is_log else []
        return marks if len(marks) > 1 else self._inside(ticks(self.low, self.high, most))

    def _inside(self, marks: list[float]) -> list[float]:
        return [mark for mark in marks if -1e-9 < self.share(mark) < 1 + 1e-9]


def _vertical(chart: Chart) -> Axis:
    heights = [min(y, chart.highest) for _, y in (*chart.curve, *chart.dots)]
    low, high = min(heights), max(heights)
    if chart.log_y:
        return Axis(low / 1.03, high * 1.03, is_log=True)  # leaves room above and below, even if all values are equal
    low = min(0.0, low)
    ends = ticks(low, high if high > low else low + 1)
    return Axis(ends[0], ends[-1], is_log=False)


def _draw(chart: Chart, canvas: ImageDraw.ImageDraw, top: int) -> None:
    """Draw a chart with its upper edge at the row `top` of the picture. `canvas` is the picture, enlarged by _SCALE."""
    font = ImageFont.load_default(13 * _SCALE)
    across = Axis(chart.curve[0][0], chart.curve[-1][0], chart.log_x)
    up = _vertical(chart)
    left, right = _LEFT * _SCALE, (WIDTH - _RIGHT) * _SCALE
    upper, lower = (top + _TOP) * _SCALE, (top + chart.height - _BOTTOM) * _SCALE

    def place(x: float) -> float:
        return left + (right - left) * across.share(x)

    def height(y: float) -> float:
        return lower - (lower - upper) * up.share(min(y, up.high))

    def text(at: tuple[float, float], words: str, anchor: str) -> None:
        canvas.text(at, words, fill=_INK, font=font, anchor=anchor)

    for y in up.marks(6):
        canvas.line([(left, height(y)), (right, height(y))], fill=_FAINT, width=_SCALE)
        text((left - 8 * _SCALE, height(y)), tick_label(y), "rm")
    for x in across.marks(8):
        canvas.line([(place(x), upper), (place(x), lower)], fill=_FAINT, width=_SCALE)
        text((place(x), lower + 9 * _SCALE), tick_label(x), "ma")
    canvas.line([(left, lower), (right, lower)], fill=_INK, width=_SCALE)
    for x, y in chart.dots:
        canvas.circle((place(x), height(y)), 2 * _SCALE, fill=_DOT)
    curve = [(place(x), height(y)) for x, y in chart.curve]
    canvas.line(curve, fill=_COLOURS[0], width=2 * _SCALE, joint="curve")
    legend = [(chart.dots_name, _DOT, (4, 4)), (chart.name, _COLOURS[0], (16, 2))]
    for (name, x), colour in zip(chart.marks.items(), _COLOURS[1:], strict=False):
        canvas.line([(place(x), upper), (place(x), lower)], fill=colour, width=2 * _SCALE)
        legend.append((name, colour, (2, 14)))
    text((left, upper - 24 * _SCALE), chart.title, "lm")
    text((right, lower + 28 * _SCALE), chart.x_label, "ra")
    end, middle = float(right), upper - 24 * _SCALE
    for name, colour, (wide, high) in reversed(legend):
        if name:
            text((end, middle), name, "rm")
            end -= font.getlength(name) + (8 + wide) * _SCALE
            box = (end, middle - high * _SCALE / 2, end + wide * _SCALE, middle + high * _SCALE / 2)
            canvas.rectangle(box, fill=colour)
            end -= 20 * _SCALE


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return equally spaced round numbers that cover the range from `low` to a larger `high`.

    There are at most `most` + 1 numbers if `low` is 0, else at most `most` + 2.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    # The factor 20 is needed if rounding makes rough / power slightly larger than 10.
    apart = next(nice * power for nice in (1, 2, 2.5, 5, 10, 20) if nice * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [float(f"{k * apart:.12g}") for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten that cover the range from `low` > 0 to `high`, and, if they are few, round multiples."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 2, 5) if len(powers) <= 4 else (1,)
    return [float(f"{factor}e{power}") for power in powers[:: len(powers) // 14 + 1] for factor in factors]


def tick_label(value: float) -> str:
    """Return a round number in digits, or as a power of ten if it has very many digits."""
    if value and not 1e-7 <= abs(value) < 1e9:
        return f"{value:g}"
    return f"{value:,.10f}".rstrip("0").rstrip(".")
