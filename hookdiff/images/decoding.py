"""Converts pictures of any mode to grey or RGB of the colour space sRGB, without transparency."""

from typing import Any

from hookdiff.errors import UserError
from hookdiff.images.colour_profiles import to_srgb
from hookdiff.images.modes import load, orientation


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
    is_upright = image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info)
    if is_upright or orientation(image) < 5:  # of a TIFF, Pillow has turned the size already
        return int(width), int(height)
    return int(height), int(width)


def decode(image: Any, channels: int | None, background: str) -> Any:
    """Return the first frame of a Pillow image, upright, in mode L or RGB, in front of the colour `background`.

    `channels` is 1, 3, or None, which keeps grey pictures grey. Values of more than 8 bits are scaled to 8 bits.
    Colours are converted to sRGB by the profile of the image, if it has one that `profile_fault` accepts. `load` lists
    the errors.
    """
    from PIL import Image

    image = load(image)
    own = num_channels(image.mode)
    mode = "L" if (channels or own) == 1 else "RGB"
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        colours = to_srgb(layer.getchannel("R") if own == 1 else layer.convert("RGB"))
        image = Image.new("RGB", image.size, background)
        image.paste(colours.convert("RGB"), mask=layer.getchannel("A"))
    else:
        image = to_srgb(image)
    return image if image.mode == mode else image.convert(mode)
