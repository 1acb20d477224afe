"""Makes a filmstrip and an animation of a whole training from the sheets in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define

from hookdiff.log import PanelLayout, Picture, panel_layouts, read_info
from hookdiff.run_dir import read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")

_COLUMNS = 10  # columns of the filmstrip
_FRAMES = 60  # frames of the animation
_LINE = 18  # height of the text above a frame


@define(frozen=True, eq=False)
class Frame:
    """The sheet of one step."""

    step: int
    picture: Image
    place: PanelLayout  # layout of its first panel


def frames(sheets: Mapping[int, Path], most: int) -> list[Frame]:
    """Return at most `most` of the sheets, by step: the first, the last, and others at equal distances.

    Damaged sheets are left out, and so are sheets with another layout than the last, which come from another config.
    """
    opened = []
    for step in spread_out(sorted(sheets), most):
        picture = read_picture(sheets[step])
        first = next(panel_layouts(read_info(picture)), None) if picture else None
        if picture and first and first.is_inside(picture.size):
            opened.append(Frame(step, picture, first))
    layouts = [(frame.place.whole, frame.place.columns) for frame in opened]
    return [frame for frame, layout in zip(opened, layouts, strict=True) if layout == layouts[-1]]


def spread_out(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most `most` of `items`: the first, the last, and others at equal distances."""
    if len(items) <= most:
        return items
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def filmstrip(sheets: Mapping[int, Path], rows: int, classes: Sequence[str] = ()) -> Picture | None:
    """Return a picture with a row for each of `rows` images of a sheet, and a column for each step.

    The images are at equal distances in the first panel, so they show different classes in a panel with `classes`.
    The info of the picture has the steps of the columns and the classes of the rows.
    """
    import numpy
    from PIL import Image

    shown = frames(sheets, _COLUMNS)
    if len(shown) < 2:
        return None
    place, gap = shown[-1].place, 4
    rows = min(rows, place.num)
    size = gap + len(shown) * (place.width + gap), _LINE + rows * (place.height + gap)
    film = Image.new(shown[-1].picture.mode, size, "white")
    for column, frame in enumerate(shown):
        left = gap + column * (place.width + gap)
        _write(film, f"{frame.step:,}", left + place.width // 2)
        for row in range(rows):
            box = place.box(row * place.num // rows)
            film.paste(frame.picture.crop(box), (left, _LINE + row * (place.height + gap)))
    info: dict[str, Any] = {"training_steps": [frame.step for frame in shown]}
    if classes:
        info["classes"] = [classes[row * len(classes) // rows] for row in range(rows)]
    return Picture(numpy.array(film), info)


def growing_up(sheets: Mapping[int, Path]) -> Sequence[Image]:
    """Return the frames of an animation: the first panel of the sheets, with the step above it."""
    from PIL import Image

    animated = []
    for frame in frames(sheets, _FRAMES):
        shown = frame.picture.crop(frame.place.whole)
        canvas = Image.new(shown.mode, (shown.width, shown.height + _LINE), "white")
        canvas.paste(shown, (0, _LINE))
        _write(canvas, f"step {frame.step:,}", canvas.width // 2)
        animated.append(canvas)
    return animated


def _write(picture: Image, text: str, middle: int) -> None:
    from PIL import ImageDraw, ImageFont

    font = ImageFont.load_default(12)
    ImageDraw.Draw(picture).text((middle, _LINE // 2), text, fill=0, font=font, anchor="mm")
