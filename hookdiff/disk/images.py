"""Images for people to look at: uint8 pixels, and grids in a PNG file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hookdiff.disk.files import new_file
from hookdiff.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

_GAP, _LINE = 4, 15  # pixels between the images of a grid, and the height of a line of text


def to_uint8(images: Tensor) -> Tensor:
    """Return images (n c h w in [-1, 1]) as rounded uint8 on the CPU; values outside the range are clipped."""
    return images.detach().float().add(1).mul(127.5).round().clamp(0, 255).to("cpu", torch.uint8)


def as_pictures(images: Tensor) -> Tensor:
    """Return images (n c h w) that can be shown: with 1 or 3 channels unchanged, otherwise a grey image per channel."""
    return images if images.shape[1] in (1, 3) else images.flatten(0, 1).unsqueeze(1)


def check_writable(path: Path) -> None:
    """Raise UserError if no file can be written at `path`; the check writes nothing."""
    parent = next((folder for folder in path.absolute().parents if folder.exists()), path)
    if path.is_dir() or not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"{path}: cannot be written; expected a file in a directory with write permission")


def save_image(image: Tensor, path: Path) -> None:
    """Write one image (c h w, uint8, c 1 or 3) to a PNG file, which appears whole or not at all."""
    with new_file(path) as partial:
        _as_pillow(image).save(partial, "PNG")


def save_grid(
    images: Tensor,
    path: Path,
    columns: int | None = None,
    scale: int | None = None,
    names: Sequence[str] = (),
) -> None:
    """Write images (n c h w, uint8 or floats in [-1, 1]) as a grid to one PNG file, which appears whole or not at all.

    `columns` None makes the grid as square as possible. `scale` enlarges both sides with smooth interpolation; None
    enlarges small images to a width of about 64 pixels. `names`, one for each image, are written once below each column
    if its images share one, and else below each image.
    """
    from PIL import Image  # torchvision's grids would import torch's compiler

    shown = as_pictures(images if images.dtype == torch.uint8 else to_uint8(images))
    scale = scale or max(1, 64 // shown.shape[-1])
    if scale > 1:
        larger = functional.interpolate(shown.float(), scale_factor=scale, mode="bicubic")
        shown = larger.round().clamp(0, 255).to(torch.uint8)
    columns = min(columns or math.ceil(math.sqrt(len(shown))), len(shown))
    at_the_end = all(len(set(names[column::columns])) == 1 for column in range(columns))
    line, gap = _LINE * bool(names), _GAP * (len(shown) > 1)
    height, width = shown.shape[-2:]
    right, down = width + gap, height + gap + (0 if at_the_end else line)
    size = gap + columns * right, gap + math.ceil(len(shown) / columns) * down + line * at_the_end
    grid = Image.new(_as_pillow(shown[0]).mode, size, "white")
    for number, image in enumerate(shown):
        row, column = divmod(number, columns)
        left, top = gap + column * right, gap + row * down
        grid.paste(_as_pillow(image), (left, top))
        if names and not at_the_end:
            _write(grid, names[number], left, top + height, width)
        elif number < len(names[:columns]):
            _write(grid, names[number], left, size[1] - line, width)
    with new_file(path) as partial:
        grid.save(partial, "PNG")


def _as_pillow(image: Tensor) -> Image:
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())


def _write(picture: Image, text: str, left: int, top: int, width: int) -> None:
    """Write as much of `text` as fits into the middle of a line of this width."""
    from PIL import ImageDraw, ImageFont

    draw, font, whole = ImageDraw.Draw(picture), ImageFont.load_default(_LINE - 3), text
    while text and draw.textlength(text, font) > width:
        whole = whole[:-1]
        text = f"{whole}..." if whole else ""
    draw.text((left + width / 2, top + _LINE / 2), text, fill=0, font=font, anchor="mm")
