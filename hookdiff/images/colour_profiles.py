"""Converts pictures to sRGB by the colour profiles (ICC) in their files."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy

_KEPT = 16  # profiles; those of CMYK have megabytes
_SAME = 2  # levels: profiles of sRGB by different makers differ by less, and their pictures stay as they are
_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}  # of Pillow, by the colour space of a profile
_STEPS = range(0, 256, 15)
_COLOURS = numpy.stack(numpy.meshgrid(_STEPS, _STEPS, _STEPS), -1).reshape(1, -1, 3).astype(numpy.uint8)
_GREYS = numpy.arange(256, dtype=numpy.uint8)[None]


def profile_fault(image: Any) -> str | None:
    """Return why the profile of a picture is ignored; None if it is not, or there is none. Only the header is read."""
    try:
        _conversion_of(image)
    except ValueError as error:
        return str(error)
    return None


def usable_conversion(image: Any) -> Any:
    """Return the conversion of a Pillow image to sRGB by its profile; None if there is nothing to convert.

    It is a table of the values (256, uint8) for a grey image, and a transform of ImageCms for others. An image with a
    `profile_fault` is not converted.
    """
    try:
        return _conversion_of(image)
    except ValueError:
        return None


def to_srgb(image: Any) -> Any:
    """Return a Pillow image of 8 bits, without transparency, in colours of sRGB. Grey stays grey."""
    if (conversion := usable_conversion(image)) is None:
        return image
    if _is_grey(image):
        return image.convert("L").point(conversion.tolist())
    return conversion.apply(image.convert(conversion.input_mode))


def _is_grey(image: Any) -> bool:
    from PIL import Image

    return Image.getmodebase(image.mode) == "L"


def _conversion_of(image: Any) -> Any:
    """Return the conversion of an image by its profile; None if there is nothing to convert.

    Raises ValueError for a profile that is broken or of another kind of picture.
    """
    if not hasattr(image, "convert"):  # an array
        return None
    profile = image.info.get("icc_profile", b"")  # None: Pillow could not unpack it
    if profile == b"" or image.mode == "LAB":  # Pillow converts the latter itself
        return None
    if not isinstance(profile, bytes):
        raise ValueError("its colour profile is broken")
    return _conversion(profile, image.mode == "CMYK", _is_grey(image))


@lru_cache(maxsize=_KEPT)
def _conversion(profile: bytes, is_cmyk: bool, is_grey: bool) -> Any:
    """Return a table of 256 values for a grey picture, a transform of ImageCms for others, None if nothing changes."""
    from PIL import Image, ImageCms

    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = opened.profile.xcolor_space.strip()
        mode = _MODES.get(space, "")
        if (mode == "CMYK") != is_cmyk or (mode == "L" and not is_grey) or not mode:
            kind = "CMYK" if is_cmyk else "grey" if is_grey else "RGB"
            raise ValueError(f"its colour profile is for {space}, and the picture is {kind}")
        # The tables by which LittleCMS is fast are wrong by several levels in dark greys.
        flags = ImageCms.Flags.NOOPTIMIZE if is_grey else ImageCms.Flags.NONE
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB", flags=flags)
        if is_cmyk:
            return transform
        values = _GREYS if is_grey else _COLOURS
        converted = transform.apply(Image.fromarray(values).convert(mode))
    except (ImportError, OSError, ImageCms.PyCMSError) as error:  # the first from a Pillow without LittleCMS
        raise ValueError(f"its colour profile is broken: {error}") from error
    found = numpy.asarray(converted.convert("L") if is_grey else converted)
    if numpy.abs(found.astype(int) - values).max() <= _SAME:
        return None
    return found[0] if is_grey else transform
