"""A grid of images, with names beside, above and below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from attrs import define
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from hookdiff.errors import UserError
from hookdiff.log.picture import Picture
from hookdiff.log.pixels import as_pictures, as_pillow, to_uint8
from hookdiff.log.placement import PanelLayout

_GAP, _LINE = 4, 15  # pixels around each image, and the height of a line of text
_MOST_BESIDE = 140  # pixels of a name beside a row
_SEEN = 64  # width to which small images are enlarged


@define(frozen=True, eq=False)
class Panel:
    """A grid of images and its names.

    Args:
        images: n c h w, uint8 or floats in [-1, 1].
        columns: None makes the grid as square as possible.
        title: above the grid.
        row_names: beside the rows.
        column_names: above the columns.
        captions: below each image, in order.
    """

    images: Tensor
    columns: int | None = None
    title: str = ""
    row_names: Sequence[str] = ()
    column_names: Sequence[str] = ()
    captions: Sequence[str] = ()


def grid(images: Tensor, columns: int | None = None, scale: int | None = None, captions: Sequence[str] = ()) -> Picture:
    """Return images (n c h w, uint8 or floats in [-1, 1]) as one grid; see `sheet` for `scale`."""
    drawn = Drawn.of(Panel(images, columns, captions=captions), scale)
    canvas = Image.new(drawn.mode, (drawn.width, drawn.height), "white")
    place = drawn.draw_on(canvas, 0, 0)
    return Picture(numpy.array(canvas), {"panels": [place.to_info()]})


def save_grid(
    images: Tensor, path: str | Path, columns: int | None = None, scale: int | None = None, captions: Sequence[str] = ()
) -> None:
    """Write a `grid` to one PNG file, which appears whole or not at all."""
    grid(images, columns, scale, captions).save(path)


class _HasImages(Protocol):
    @property
    def images(self) -> Tensor: ...


def show(
    images: Tensor | Sequence[Tensor] | _HasImages,
    columns: int | None = None,
    scale: int | None = None,
    captions: Sequence[str] = (),
) -> Picture:
    """Return images as a `grid`, which a notebook shows if it is the last value of a cell.

    Args:
        images: n c h w, one image c h w or h w, or a sequence of images of one size; uint8 or floats in [-1, 1]. Or the
            result of `Loop.sample`.
        columns: None makes the grid as square as possible.
        scale: factor by which the images are enlarged; None enlarges small images.
        captions: below each image, in order.

    Raises:
        UserError: if these are no images.
    """
    values: Any = getattr(images, "images", images)
    try:
        stack = values if isinstance(values, Tensor) else torch.cat([_as_images(image) for image in values])
        return grid(_as_images(stack), columns, scale, captions)
    except (TypeError, ValueError, RuntimeError):
        got = f"the shape {tuple(images.shape)}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise UserError(f"give show a tensor of images n c h w; it got {got}") from None


def _as_images(images: Tensor) -> Tensor:
    """Return images n c h w, or one image c h w or h w, as n c h w. Raises ValueError for other values."""
    if not isinstance(images, Tensor) or not 2 <= images.dim() <= 4 or not images.numel():
        raise ValueError("no images")
    return images[(None,) * (4 - images.dim())]


@define(frozen=True, eq=False)
class Drawn:
    """A panel, and the sizes in its picture, in pixels."""

    panel: Panel
    images: Sequence[Image.Image]
    place: PanelLayout  # with the panel at 0, 0
    rows: int
    gap: int
    beside: int  # width of the names beside the rows

    @classmethod
    def of(cls, panel: Panel, scale: int | None) -> Drawn:
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
        place = PanelLayout(panel.title, left, top, width, height, width + gap, height + gap + line, columns, num)
        return cls(panel, [as_pillow(image) for image in shown], place, math.ceil(num / columns), gap, beside)

    @property
    def mode(self) -> str:
        return self.images[0].mode

    @property
    def width(self) -> int:
        return max(self.place.left + self.place.columns * self.place.right, _width(self.panel.title) + 2 * _GAP)

    @property
    def height(self) -> int:
        return self.place.top + self.rows * self.place.down

    def draw_on(self, canvas: Image.Image, left: int, top: int) -> PanelLayout:
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
        return PanelLayout(**{**place.to_info(), **moved})


def _font() -> Any:
    return ImageFont.load_default(_LINE - 3)


def _width(text: str) -> int:
    return math.ceil(_font().getlength(text)) if text else 0


def _write(picture: Image.Image, text: str, left: int, top: int, width: int) -> None:
    """Write `text` centered in a line of this width; if it is too long, "..." replaces its middle."""
    font = _font()
    for length in range(min(len(text), width), 0, -1):  # characters
        half = length // 2
        fitting = text if length == len(text) else f"{text[: length - half]}...{text[len(text) - half :]}"
        if font.getlength(fitting) <= width:
            place = left + width / 2, top + _LINE / 2
            ImageDraw.Draw(picture).text(place, fitting, fill=0, font=font, anchor="mm")
            return
