"""Converts pictures of any mode to grey or RGB. Only this file handles bit depth, transparency and orientation."""

from typing import Any

import numpy

from hookdiff.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")

_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112  # tags of TIFF and Exif


class Unreadable(UserError):
    """A sample that cannot be read; the message names it."""


def num_channels(mode: str) -> int:
    """Return 1 for a grey mode of Pillow, 3 for any other."""
    from PIL import Image

    return 1 if Image.getmodebase(mode) == "L" else 3


def upright_size(image: Any) -> tuple[int, int]:
    """Return width and height after the orientation in Exif is applied; the pixels of the file are not read."""
    width, height = image.size
    # For a PNG, Pillow would read the whole file, because an orientation may come after the pixels.
    if (image.format == "PNG" and "exif" not in image.info) or _orientation(image) < 5:
        return int(width), int(height)
    if image.format == "TIFF":  # in newer versions of Pillow, `size` is swapped already
        width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
    return int(height), int(width)


def decode(image: Any, channels: int | None, background: str) -> Any:
    """Return the first frame of a Pillow image, upright, in mode L or RGB, in front of the colour `background`.

    `channels` is 1, 3, or None, which keeps grey pictures grey. 16 bits are scaled to 8. Integers of 32 bits must lie
    in the range of 16 bits, floats in [0, 1]. Raises ValueError for values outside, and any error of Pillow.
    """
    from PIL import Image, ImageOps

    # Else Pillow maps some files: one that shrinks kills the process, and a TIFF to be rotated has swapped sides.
    image.filename = ""
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
    """Return the orientation in Exif, 1 (upright) to 8; 1 if the Exif data is broken."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the pixels may still be good
        return 1
    return value if value in range(1, 9) else 1


def _eight_bits(values: Any) -> Any:
    top = 1 if values.dtype.kind == "f" else 65535
    if not (values.min() >= 0 and values.max() <= top):  # written so that NaN is refused too
        raise ValueError(f"values from {values.min()} to {values.max()}, expected 0 to {top}")
    if top == 1:
        return numpy.rint(values * 255).astype(numpy.uint8)
    return ((values.astype(numpy.uint32) + 128) // 257).astype(numpy.uint8)
