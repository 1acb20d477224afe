import io
import struct
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff.images import Transforms, decode, profile_fault
from tests.images.variants import chunk, saved

WHITE = (0.9642, 1, 0.8249)
# The columns of red, green and blue in XYZ for the white D50, as the profiles of these two spaces have them.
P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))


def tag(kind: bytes, *values: float, head: bytes = b"") -> bytes:
    return kind + bytes(4) + head + b"".join(struct.pack(">i", round(value * 65536)) for value in values)


LINEAR = tag(b"para", 1, head=bytes(4))
CURVE = tag(b"para", 2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045, head=b"\0\3\0\0")  # of sRGB and Display P3


def profile(space: bytes, connection: bytes = b"XYZ ", **tags: bytes) -> bytes:
    """Return an ICC profile of version 4 (ICC.1:2022)."""
    head = bytes(8) + b"\4\x30\0\0mntr" + space + connection + bytes(12) + b"acsp" + bytes(28)
    head, content = (head + tag(b"", *WHITE)[4:]).ljust(128, b"\0") + struct.pack(">I", len(tags) + 1), b""
    for name, value in {"wtpt": tag(b"XYZ ", *WHITE), **tags}.items():
        head += name.encode() + struct.pack(">II", 144 + 12 * len(tags) + len(content), len(value))
        content += value + bytes(-len(value) % 4)
    return struct.pack(">I", len(head + content)) + (head + content)[4:]


def of_rgb(columns: Any, curve: bytes) -> bytes:
    tags = {f"{c}XYZ": tag(b"XYZ ", *column) for c, column in zip("rgb", columns, strict=True)}
    return profile(b"RGB ", **tags, rTRC=curve, gTRC=curve, bTRC=curve)


DISPLAY_P3, GREY = of_rgb(P3, CURVE), profile(b"GRAY", kTRC=LINEAR)
RAMP, UNIT = bytes(range(256)), tag(b"", 1, 0, 0, 0, 1, 0, 0, 0, 1)[4:]
# All inks together and none are the same grey, L* = 80.
INKS = profile(
    b"CMYK", b"Lab ", A2B0=b"mft1\0\0\0\0\4\3\2\0" + UNIT + RAMP * 4 + bytes([204, 128, 128]) * 16 + RAMP * 3
)
PIXEL, DARK = Image.new("RGB", (4, 4), (200, 100, 50)), Image.new("L", (4, 4), 50)
CMYK = Image.new("CMYK", (4, 4), (9, 80, 200, 3))


@pytest.mark.parametrize(
    ("kind", "image", "icc", "expected", "fault"),
    [
        ("PNG", PIXEL, DISPLAY_P3, (215, 93, 31), None),
        ("JPEG", PIXEL, DISPLAY_P3, (215, 93, 31), None),
        ("WEBP", PIXEL, DISPLAY_P3, (215, 93, 31), None),
        ("TIFF", PIXEL, DISPLAY_P3, (215, 93, 31), None),
        ("PNG", PIXEL.convert("RGBA"), DISPLAY_P3, (215, 93, 31), None),
        ("PNG", PIXEL.quantize(), DISPLAY_P3, (215, 93, 31), None),
        ("PNG", PIXEL, of_rgb(SRGB, CURVE), (200, 100, 50), None),
        ("PNG", PIXEL, of_rgb(SRGB, LINEAR), (229, 168, 122), None),
        ("PNG", DARK, of_rgb(P3, LINEAR), 122, None),
        ("PNG", DARK, GREY, 122, None),
        ("PNG", DARK.convert("LA"), GREY, (122, 122, 122), None),
        ("JPEG", CMYK, INKS, (198, 198, 198), None),
        ("TIFF", CMYK, INKS, (198, 198, 198), None),
        ("PNG", PIXEL, b"no profile", (200, 100, 50), "broken"),
        ("PNG", PIXEL, GREY, (200, 100, 50), "GRAY"),
        ("PNG", PIXEL, INKS, (200, 100, 50), "CMYK"),
    ],
)
def test_colours_become_srgb_by_their_profile(kind: str, image: Any, icc: bytes, expected: Any, fault: Any) -> None:
    options: dict[str, Any] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    opened = Image.open(io.BytesIO(saved(image, kind, icc_profile=icc, **options)))
    reason = profile_fault(opened)
    assert reason is None if fault is None else fault in str(reason)
    assert decode(opened, 1 if image.mode == "L" else 3, "white").getpixel((1, 1)) == expected
    assert Transforms().first_stage[0] == 2  # raised when pixels change, so that caches are made anew


def test_sixteen_bits_are_converted_before_they_are_rounded() -> None:
    values = numpy.arange(0, 65536, 7, dtype=numpy.uint16)
    opened = Image.open(io.BytesIO(saved(Image.fromarray(values[None]), "PNG", icc_profile=GREY)))
    light = values / 65535
    expected = 255 * numpy.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    assert numpy.abs(numpy.asarray(decode(opened, None, "white"))[0] - expected).max() < 1  # at 8 bits: steps of 13


def test_a_profile_that_cannot_be_unpacked_is_ignored() -> None:
    content = saved(PIXEL, "PNG")
    with Image.open(io.BytesIO(content[:33] + chunk(b"iCCP", b"icc\0\0no zlib") + content[33:])) as image:
        assert "broken" in str(profile_fault(image))
        assert decode(image, None, "white").getpixel((1, 1)) == (200, 100, 50)
