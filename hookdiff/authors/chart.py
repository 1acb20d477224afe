"""Draws curves over steps with Pillow: axes with round numbers, and a panel for each curve."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from hookdiff.errors import UserError

WIDTH, HEIGHT = 900, 300  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 24, 40, 44  # margins
_SCALE = 2  # the picture is drawn larger and then shrunk, so that lines are smooth
_INK, _FAINT, _PAPER = "#222222", "#dddddd", "white"
_COLOURS = ("#1f5fa8", "#b5471b", "#2b7f3f", "#7a3e9d")


def draw_curves(curves: Mapping[str, Callable[[int], float]], last: int, path: Path) -> None:
    """Write a picture of functions of the step, at least 0 each, from step 0 to `last` >= 1, in a panel each.

    Args:
        curves: the functions, by the name above their panel.
        last: the last step.
        path: file to write; its suffix gives the format.

    Raises:
        UserError: if the file cannot be written, or its name ends in no known format.
    """
    picture = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * len(curves) * _SCALE), _PAPER)
    # Every step, or four steps for each pixel.
    shown = sorted({round(k * last / (4 * WIDTH)) for k in range(4 * WIDTH + 1)})
    for row, (name, curve) in enumerate(curves.items()):
        values = [(step, curve(step)) for step in shown]
        _panel(ImageDraw.Draw(picture), row * HEIGHT, name, values, _COLOURS[row % len(_COLOURS)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.resize((WIDTH, HEIGHT * len(curves)), Image.Resampling.LANCZOS).save(path)
    except (OSError, ValueError) as error:  # ValueError: the name ends in no known format
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
