"""Draws curves with Pillow, on axes with round numbers: rates over steps, and the loss over rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from hookdiff import UserError
from hookdiff.disk import check_writable

if TYPE_CHECKING:
    from hookdiff_lr.find import RangeTest

WIDTH, HEIGHT = 900, 300  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 24, 40, 44  # margins
_SCALE = 2  # the picture is drawn larger and then shrunk, so that lines are smooth
_INK, _FAINT, _DOT, _PAPER = "#222222", "#dddddd", "#9db8d6", "white"
_COLOURS = ("#1f5fa8", "#b5471b", "#2b7f3f", "#7a3e9d")


def draw(factor: Callable[[int], float], rates: Mapping[str, float], steps: int, path: Path) -> None:
    """Write a picture of `rates` times `factor` from step 0 to `steps` >= 1 to `path`, with a panel for each rate."""
    picture = _paper(HEIGHT * len(rates))
    # Every step, or four steps for each pixel.
    shown = sorted({round(k * steps / (4 * WIDTH)) for k in range(4 * WIDTH + 1)})
    factors = [(step, factor(step)) for step in shown]
    for row, (name, rate) in enumerate(rates.items()):
        values = [(step, rate * share) for step, share in factors]
        _panel(ImageDraw.Draw(picture), row * HEIGHT, name, values, _COLOURS[row % len(_COLOURS)])
    _save(picture, path)


def draw_range(test: RangeTest, name: str, path: Path) -> None:
    """Write a picture of the losses of `test` over its rates, both on a logarithmic scale, to `path`.

    The rate is called `name`. A loss above the one at which the test stops is drawn at the upper edge. If there are
    losses below 0, their scale is linear.
    """
    height = 2 * HEIGHT
    picture = _paper(height)
    canvas, font = ImageDraw.Draw(picture), ImageFont.load_default(13 * _SCALE)
    is_log = min(test.losses) > 0
    scaled = math.log10 if is_log else float
    low, high = min(test.losses), min(max(test.losses), test.limit)
    bottom, top = scaled(low), max(scaled(high), scaled(low) + 1e-3)
    first, last = math.log10(test.rates[0]), math.log10(test.rates[-1])

    def at(rate: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * (math.log10(rate) - first) / (last - first)
        y = _TOP + (height - _TOP - _BOTTOM) * (top - scaled(min(loss, high))) / (top - bottom)
        return x * _SCALE, y * _SCALE

    marks = _log_ticks(low, high) if is_log else [low + mark for mark in ticks(high - low) if mark <= high - low]
    for value in marks:
        canvas.line([at(test.rates[0], value), at(test.rates[-1], value)], fill=_FAINT, width=_SCALE)
        x, y = at(test.rates[0], value)
        canvas.text((x - 8 * _SCALE, y), f"{value:.3g}", fill=_INK, font=font, anchor="rm")
    for power in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1):
        x, y = at(10.0**power, low)
        canvas.line([at(10.0**power, high), (x, y)], fill=_FAINT, width=_SCALE)
        canvas.text((x, y + 9 * _SCALE), f"{10.0**power:g}", fill=_INK, font=font, anchor="ma")
    canvas.line([at(test.rates[0], low), at(test.rates[-1], low)], fill=_INK, width=_SCALE)
    for rate, loss in zip(test.rates, test.losses, strict=True):
        x, y = at(rate, loss)
        canvas.circle((x, y), 2 * _SCALE, fill=_DOT)
    curve = [at(rate, loss) for rate, loss in zip(test.rates, test.smooth, strict=True)]
    canvas.line(curve, fill=_COLOURS[0], width=2 * _SCALE, joint="curve")
    rises, suggested = (("rises", test.rises, _COLOURS[1]), ("suggested", test.suggested, _COLOURS[2]))
    for word, where, colour in (suggested, rises):
        if where is not None and test.rates[0] <= where <= test.rates[-1]:
            x, y = at(where, high)
            canvas.line([(x, y), at(where, low)], fill=colour, width=2 * _SCALE)
            canvas.text((x, y - 6 * _SCALE), f"{word} {where:.2g}", fill=colour, font=font, anchor="ms")
    canvas.text((_LEFT * _SCALE, 12 * _SCALE), "loss", fill=_COLOURS[0], font=font, anchor="la")
    edge = (WIDTH - _RIGHT) * _SCALE, (height - 16) * _SCALE
    canvas.text(edge, name, fill=_INK, font=font, anchor="ra")
    _save(picture, path)


def check_picture(path: Path) -> None:
    """Raise UserError if no picture can be written at `path`; the check writes nothing."""
    check_writable(path)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise UserError(f"{path}: cannot be written; expected the name of a picture, such as {path.stem}.png")


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` > 0 to `high`: powers of ten, and multiples of them if there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 2, 5) if len(powers) <= 4 else (1,)
    return [mark for power in powers for factor in factors if low <= (mark := factor * 10.0**power) <= high]


def _paper(height: int) -> Image.Image:
    return Image.new("RGB", (WIDTH * _SCALE, height * _SCALE), _PAPER)


def _save(picture: Image.Image, path: Path) -> None:
    small = picture.resize((picture.width // _SCALE, picture.height // _SCALE), Image.Resampling.LANCZOS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        small.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None


def _panel(canvas: ImageDraw.ImageDraw, top: int, name: str, values: Sequence[tuple[int, float]], colour: str) -> None:
    width, height, steps = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM, values[-1][0]
    marks = ticks(max(value for _, value in values) or 1.0)
    highest = marks[-1]

    def at(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + width * step / steps
        y = top + _TOP + height * (1 - value / highest)
        return x * _SCALE, y * _SCALE

    font = ImageFont.load_default(13 * _SCALE)
    for value in marks:
        canvas.line([at(0, value), at(steps, value)], fill=_FAINT if value else _INK, width=_SCALE)
        x, y = at(0, value)
        canvas.text((x - 8 * _SCALE, y), f"{value:g}", fill=_INK, font=font, anchor="rm")
    for step in ticks(steps, most=8):
        if step <= steps:
            x, y = at(step, 0)
            canvas.line([(x, y), (x, y + 5 * _SCALE)], fill=_INK, width=_SCALE)
            canvas.text((x, y + 9 * _SCALE), f"{step:,.10g}", fill=_INK, font=font, anchor="ma")
    canvas.text((_LEFT * _SCALE, (top + 12) * _SCALE), name, fill=colour, font=font, anchor="la")
    canvas.text(((WIDTH - _RIGHT) * _SCALE, (top + HEIGHT - 16) * _SCALE), "step", fill=_INK, font=font, anchor="ra")
    canvas.line([at(*point) for point in values], fill=colour, width=2 * _SCALE, joint="curve")


def ticks(highest: float, most: int = 6) -> list[float]:
    """Return at most `most` + 1 round numbers at equal distances, from 0 to `highest` > 0 or just above it."""
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    # 20 is for a quotient that is rounded to just above 10.
    apart = next(nice * power for nice in (1, 2, 2.5, 5, 10, 20) if nice * power >= rough * (1 - 1e-9))
    count = math.ceil(highest / apart - 1e-9)
    return [float(f"{k * apart:.12g}") for k in range(count + 1)]
