"""Grids of images, with names beside, above and below them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from attrs import define
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from hookdiff.pictures.picture import Picture
from hookdiff.pictures.pixels import as_pictures, as_pillow, to_uint8
from hookdiff.pictures.place import Place

_GAP, _LINE = 4, 15  # pixels around each image, and the height of a line of text
_APART = 12  # pixels between two panels
_MOST_BESIDE = 140  # pixels of a name beside a row
_SEEN = 64  # width to which small images are enlarged


@define(frozen=True, eq=False)
class Panel:
    """A grid of images and its names.

    images: n c h w, uint8 or floats in [-1, 1]. columns: None makes the grid as square as possible. title: above the
    grid. row_names, column_names: beside the rows and above the columns. captions: below each image, in order.
    """

    images: Tensor
    columns: int | None = None
    title: str = ""
    row_names: Sequence[str] = ()
    column_names: Sequence[str] = ()
    captions: Sequence[str] = ()


def sheet(
    panels: Sequence[Panel],
    *,
    scale: int | None = None,
    abreast: int | None = None,
    info: Mapping[str, Any] | None = None,
) -> Picture:
    """Return a picture of all panels, `abreast` in a row; None puts all of them in one row.

    `scale` enlarges both sides of the images with smooth interpolation; None enlarges small images to a width of about
    64 pixels. The info of the picture gets "panels", from which `places` reads where the images are.
    """
    drawn = [_Drawn.of(panel, scale) for panel in panels]
    abreast = abreast or len(drawn)
    bands = [drawn[start : start + abreast] for start in range(0, len(drawn), abreast)]
    widths = [max(band[column].width for band in bands if column < len(band)) for column in range(len(bands[0]))]
    heights = [max(one.height for one in band) for band in bands]
    size = sum(widths) + _APART * (len(widths) - 1), sum(heights) + _APART * (len(heights) - 1)
    is_grey = all(one.images[0].mode == "L" for one in drawn)
    canvas, found, top = Image.new("L" if is_grey else "RGB", size, "white"), [], 0
    for band, height in zip(bands, heights, strict=True):
        left = 0
        for one, width in zip(band, widths, strict=False):
            found.append(one.draw_on(canvas, left, top).to_info())
            left += width + _APART
        top += height + _APART
    return Picture(numpy.array(canvas), {**(info or {}), "panels": found})


def grid(images: Tensor, columns: int | None = None, scale: int | None = None, captions: Sequence[str] = ()) -> Picture:
    """Return images (n c h w, uint8 or floats in [-1, 1]) as one grid; `scale` is that of `sheet`."""
    return sheet([Panel(images, columns, captions=captions)], scale=scale)


def by_class(images: Tensor, labels: Sequence[int], names: Sequence[str], columns: int | None = None) -> Panel:
    """Return a panel in which the images of each class have rows of their own, with the name of the class beside them.

    `labels` are those of the images, `names` those of the classes; a label of -1 stands for no class. The classes are
    in the order of their first images. Without `columns` the panel is as square as possible. The last row of a class is
    filled up with white.
    """
    pixels = as_pictures(images if images.dtype == torch.uint8 else to_uint8(images))
    labels = [label for label in labels for _ in range(len(pixels) // len(images))]  # an image may be several pictures
    groups = {label: [k for k, one in enumerate(labels) if one == label] for label in dict.fromkeys(labels)}
    largest = max(map(len, groups.values()))
    columns = min(columns or math.ceil(math.sqrt(len(labels))), largest)
    columns = math.ceil(largest / math.ceil(largest / columns))  # as many rows, but fuller ones
    white = torch.full_like(pixels[:1], 255)
    rows, beside = [], []
    for label, numbers in groups.items():
        missing = -len(numbers) % columns
        rows += [pixels[numbers], white.expand(missing, *white.shape[1:])]
        beside += [names[label] if label >= 0 else "-", *[""] * ((len(numbers) + missing) // columns - 1)]
    return Panel(torch.cat(rows), columns, row_names=beside)


def save_grid(
    images: Tensor, path: Path, columns: int | None = None, scale: int | None = None, captions: Sequence[str] = ()
) -> None:
    """Write a `grid` to one PNG file, which appears whole or not at all."""
    grid(images, columns, scale, captions).save(path)


@define(frozen=True, eq=False)
class _Drawn:
    """A panel, and the measures of its picture in pixels."""

    panel: Panel
    images: Sequence[Image.Image]
    place: Place  # with the panel at 0, 0
    rows: int
    gap: int
    beside: int  # width of the names beside the rows
    line: int  # height of a caption

    @classmethod
    def of(cls, panel: Panel, scale: int | None) -> _Drawn:
        pixels = panel.images if panel.images.dtype == torch.uint8 else to_uint8(panel.images)
        shown = as_pictures(pixels)
        scale = scale or max(1, _SEEN // shown.shape[-1])
        if scale > 1:
            larger = functional.interpolate(shown.float(), scale_factor=scale, mode="bicubic")
            shown = larger.round().clamp(0, 255).to(torch.uint8)
        num, _, height, width = shown.shape
        columns = min(panel.columns or math.ceil(math.sqrt(num)), num)
        gap, line = _GAP * (num > 1), _LINE * bool(panel.captions)
        beside = min(_MOST_BESIDE, max((_width(name) + 2 * _GAP for name in panel.row_names), default=0))
        left, top = gap + beside, gap + _LINE * bool(panel.title) + _LINE * bool(panel.column_names)
        place = Place(panel.title, left, top, width, height, width + gap, height + gap + line, columns, num)
        return cls(panel, [as_pillow(image) for image in shown], place, math.ceil(num / columns), gap, beside, line)

    @property
    def width(self) -> int:
        return max(self.place.left + self.place.columns * self.place.right, _width(self.panel.title) + 2 * _GAP)

    @property
    def height(self) -> int:
        return self.place.top + self.rows * self.place.down

    def draw_on(self, canvas: Image.Image, left: int, top: int) -> Place:
        """Draw the panel at `left`, `top`, and return the place of its images on the canvas."""
        panel, place = self.panel, self.place
        for number, image in enumerate(self.images):
            x, y, _, bottom = place.box(number)
            canvas.paste(image, (left + x, top + y))
            if number < len(panel.captions):
                _write(canvas, panel.captions[number], left + x, top + bottom, place.width)
        inner = place.columns * place.right - self.gap
        _write(canvas, panel.title, left + place.left, top, max(inner, _width(panel.title)))
        for column, name in enumerate(panel.column_names[: place.columns]):
            _write(canvas, name, left + place.box(column)[0], top + place.top - self.gap - _LINE, place.width)
        for row, name in enumerate(panel.row_names[: self.rows]):
            middle = top + place.top + row * place.down + (place.height - _LINE) // 2
            _write(canvas, name, left, middle, self.beside)
        moved = {"left": left + place.left, "top": top + place.top}
        return Place(**{**place.to_info(), **moved})


def _font() -> Any:
    return ImageFont.load_default(_LINE - 3)


def _width(text: str) -> int:
    return math.ceil(_font().getlength(text)) if text else 0


def _write(picture: Image.Image, text: str, left: int, top: int, width: int) -> None:
    """Write as much of `text` as fits into the middle of a line of this width."""
    draw, font, whole = ImageDraw.Draw(picture), _font(), text
    while text and draw.textlength(text, font) > width:
        whole = whole[:-1]
        text = f"{whole}..." if whole else ""
    draw.text((left + width / 2, top + _LINE / 2), text, fill=0, font=font, anchor="mm")
