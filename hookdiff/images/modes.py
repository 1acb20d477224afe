"""Loads the pixels of a picture file with the meaning that its format gives them.

Pillow alone reads some variants wrongly, such as white as black. A variant without a known meaning is refused.
"""

import io
from collections.abc import Callable
from typing import Any

import numpy

from hookdiff.images.colour_profiles import usable_conversion

# Tags of TIFF.
_BITS, _PHOTOMETRIC, _PLANES, _COLOURS, _SAMPLE_FORMAT, _SUBSAMPLING = 258, 262, 284, 320, 339, 530
_SIGNED = 2  # a sample format
# Raw modes in which Pillow ignores whether 0 is black or white.
_INVERTIBLE = ("I;16", "I;16N", "F;32F", "F;32BF", "F;32NF")
_SIZE = b"\xff\x4f\xff\x51"  # how the code of JPEG 2000 begins

Loaded = tuple[Any, float | None, float | None]  # an image, and its values of black and white; None: usual


def load(image: Any) -> Any:
    """Load a Pillow image, and return it upright in a mode of 8 bits.

    Greys of more bits are converted to sRGB by their colour profile before they are rounded. Integers of 16 bits or
    more must lie in the range of 16 bits, floats in [0, 1]. Raises ValueError for other values, and for a variant of a
    format without a known meaning; and any error of Pillow.
    """
    from PIL import Image, ImageOps

    # Else Pillow memory-maps some files: a file that shrinks kills the process, and a rotated TIFF has swapped sides.
    image.filename = ""
    image = _of_icon(image) if image.format == "ICO" else image
    is_lazy = bool(getattr(image, "tile", None))
    image, black, white = _READERS.get(image.format if is_lazy else None, _plain)(image)
    if orientation(image) != 1:
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F" or image.mode.startswith("I"):
        usual = 1.0 if image.mode == "F" else 65535.0
        values = _scaled(numpy.asarray(image), black or 0.0, usual if white is None else white)
        if (curve := usable_conversion(image)) is not None:
            values = numpy.interp(values, numpy.arange(256), curve)
        return Image.fromarray(numpy.rint(values).astype(numpy.uint8))
    if white is not None:
        return image.point([min(255, round(value * 255 / white)) for value in range(256)] * len(image.getbands()))
    return image


def orientation(image: Any) -> int:
    """Return the orientation in Exif, 1 (upright) to 8; 1 if the Exif data is broken."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # the pixels may still be good
        return 1
    return value if value in range(1, 9) else 1


def _scaled(values: Any, black: float, white: float) -> Any:
    """Return values, float32, in [0, 255]."""
    low, high = sorted((black, white))
    if not (values.min() >= low and values.max() <= high):  # written so that NaN is refused too
        raise ValueError(f"values from {values.min()} to {values.max()}, expected {low:g} to {high:g}")
    return (values.astype(numpy.float32) - black) * (255 / (white - black))


def _plain(image: Any) -> Loaded:
    image.load()
    return image, None, None


def _png(image: Any) -> Loaded:
    raw, clear = _raw_mode(image), image.info.get("transparency")
    if clear is not None and raw in ("I;16B", "RGB;16B"):  # Pillow compares one byte of two
        raise ValueError("PNG of 16 bits with a transparent colour; save it with an alpha channel")
    most = {"L;2": 3, "L;4": 15}.get(raw, 0)
    if most and isinstance(clear, int) and clear <= most:  # Pillow scales the pixels to 8 bits, but not this value
        image.info["transparency"] = clear * 255 // most
    return _plain(image)


def _tiff(image: Any) -> Loaded:
    tags, codec = image.tag_v2, image.tile[0][0]
    photometric, little = tags.get(_PHOTOMETRIC, 0), tags.prefix == b"II"
    bits = tags.get(_BITS, (1,))[0]
    if _SIGNED in tags.get(_SAMPLE_FORMAT, ()) and bits < 32:
        raise ValueError("signed integers have no known black and white; save it as unsigned")
    # Pillow takes the bytes as those of one pixel after the other; earlier versions took them as RGB.
    is_ycc = codec == "raw" and photometric == 6 and image.mode != "L"
    if is_ycc and (image.mode == "RGB" or tuple(tags.get(_SUBSAMPLING, (2, 2))) != (1, 1)):
        raise ValueError("YCbCr without compression; save it as RGB")
    if codec == "libtiff":  # it gives numbers in the order of this machine
        _set_raw_mode(image, lambda raw: raw.replace(";32BF", ";32NF"))
    elif tags.get(_PLANES) == 2 and bits == 16:
        _set_raw_mode(image, lambda raw: f"{raw};16{'L' if little else 'B'}"[-5:])
    raw = _raw_mode(image)
    image.load()
    if photometric == 3 and max(colours := tags.get(_COLOURS, (256,))) < 256:
        # Old programs wrote bytes in place of 16-bit numbers, which Pillow divides by 256.
        image.putpalette(numpy.array(colours, numpy.uint8).reshape(3, -1).T.tobytes())
    if image.mode == "La":
        image = image.convert("LA")
    if raw == "I;12":
        return image, None, 4095.0
    if photometric == 0 and raw in _INVERTIBLE:
        return image, 1.0 if image.mode == "F" else 65535.0, 0.0
    return image, None, None


def _of_icon(image: Any) -> Any:
    """Return the largest picture of an icon, which Pillow loads without the transparency of a PNG in it."""
    from PIL import Image

    entry = image.ico.entry[image.ico.getentryindex(image.size)]
    content = _content(image)[entry.offset :][: entry.size]
    return Image.open(io.BytesIO(content), formats=["PNG"]) if content.startswith(b"\x89PNG") else image


def _jpeg(image: Any) -> Loaded:
    from PIL import ImageChops

    image.load()
    # Adobe stores CMYK inverted, and Pillow assumes this of all files.
    is_inverted = image.mode == "CMYK" and "adobe" not in image.info
    return ImageChops.invert(image) if is_inverted else image, None, None


def _tga(image: Any) -> Loaded:
    alpha_bits, palette = _content(image, 18)[17] & 15, image.palette
    # A raw mode with Z would invert the alpha bit.
    _set_raw_mode(image, lambda raw: raw.replace("BGRA;15Z", "BGRA;15"))
    in_palette = palette is not None and palette.rawmode == "BGRA;15Z"
    if in_palette:
        palette.rawmode = "BGRA;15"
    image.load()
    if not alpha_bits and (in_palette or image.mode in ("RGBA", "LA")):
        image = image.convert("L" if image.mode == "LA" else "RGB")
    return image, None, None


def _jpeg2000(image: Any) -> Loaded:
    content = _content(image)
    at = content.find(_SIZE) + 40  # the place of the bits, less one, of each component: three bytes apart
    bits = {1 + (byte & 127) for byte in content[at + 2 : at + 2 + 3 * int.from_bytes(content[at : at + 2]) : 3]}
    least = min(bits, default=8)
    image.load()
    # Pillow shifts the values to the upper bits.
    if image.mode.startswith("I"):
        return image, None, float((2**least - 1) << (16 - least)) if least < 16 else None
    if least >= 8:
        return image, None, None
    if len(bits) > 1 or image.mode == "P":
        raise ValueError(f"JPEG 2000 of {least} bits with a palette or other bits; save it as PNG")
    return image, None, float((2**least - 1) << (8 - least))


_READERS: dict[str | None, Callable[[Any], Loaded]] = {
    "PNG": _png,
    "TIFF": _tiff,
    "JPEG": _jpeg,
    "MPO": _jpeg,
    "TGA": _tga,
    "JPEG2000": _jpeg2000,
}


def _content(image: Any, size: int = -1) -> bytes:
    """Return the bytes of the file that an image is loaded from, or the first `size` of them."""
    at = image.fp.tell()
    image.fp.seek(0)
    content: bytes = image.fp.read(size)
    image.fp.seek(at)
    return content


def _raw_mode(image: Any) -> str:
    """Return the raw mode of Pillow, which says how the values are stored in the file."""
    arguments = image.tile[0].args
    return str(arguments if isinstance(arguments, str) else arguments[0])


def _set_raw_mode(image: Any, change: Callable[[str], str]) -> None:
    tiles = []
    for tile in image.tile:
        arguments = tile.args
        is_text = isinstance(arguments, str)
        tiles.append(tile._replace(args=change(arguments) if is_text else (change(arguments[0]), *arguments[1:])))
    image.tile = tiles
