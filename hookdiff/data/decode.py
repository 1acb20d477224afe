"""Pictures of any mode become grey or RGB: the one place that knows of depth, transparency and orientation."""

from __future__ import annotations

from typing import Any

import numpy

from hookdiff.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")

_GREY = ("1", "L", "LA", "La", "I", "F")
_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112  # tags of TIFF, and of Exif


class Unreadable(UserError):
    """A sample that cannot be read; the message names it."""


def num_channels(mode: str) -> int:
    """Return 1 for the grey ones of Pillow's modes, 3 for the others."""
    return 1 if mode in _GREY or mode.startswith("I;") else 3


def upright_size(image: Any) -> tuple[int, int]:
    """Return width and height of the upright picture; of a file that was only opened, without reading its pixels."""
    width, height = image.size
    # Pillow would read a whole PNG to look for an orientation behind its pixels.
    if (image.format == "PNG" and "exif" not in image.info) or _orientation(image) < 5:
        return int(width), int(height)
    if image.format == "TIFF":  # newer versions of Pillow have turned its size already
        width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
    return int(height), int(width)


def decode(image: Any, channels: int | None, background: str) -> Any:
    """Return the picture upright, in mode L or RGB; transparency shows `background`. Only the first frame counts.

    `channels` None keeps grey pictures grey. 16 bits are scaled to 8; 32-bit integers are taken for 16 bits, and
    floats for [0, 1]. Raises ValueError where a value is outside of these, and whatever Pillow raises.
    """
    from PIL import Image, ImageOps

    if image.format == "TIFF":
        image.filename = ""  # else Pillow maps the file with width and height swapped, if it has to be turned
    image.load()
    if _orientation(image) != 1:
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(numpy.asarray(image)))
    mode = "L" if (channels or num_channels(image.mode)) == 1 else "RGB"
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, background)
        image.paste(layer.convert("RGB"), mask=layer.getchannel("A"))
    return image if image.mode == mode else image.convert(mode)


def _orientation(image: Any) -> int:
    """Return the orientation that Exif tells, 1 to 8; 1, upright, where that part of the file is broken."""
    try:
        told = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the pixels may still be good
        return 1
    return told if told in range(1, 9) else 1


def _eight_bits(values: Any) -> Any:
    top = 1 if values.dtype.kind == "f" else 65535
    if not (values.min() >= 0 and values.max() <= top):  # written so that NaN is refused too
        raise ValueError(f"values from {values.min()} to {values.max()}, expected 0 to {top}")
    if top == 1:
        return numpy.rint(values * 255).astype(numpy.uint8)
    return ((values.astype(numpy.uint32) + 128) // 257).astype(numpy.uint8)
