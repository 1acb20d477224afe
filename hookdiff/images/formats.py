"""The formats of picture files. Everything about formats is derived from this list."""

import re
from contextlib import suppress
from functools import cache
from importlib import import_module

from attrs import define, field

HEAD = 32  # bytes at the beginning of a file, by which its format is known


@define(frozen=True)
class Format:
    """A format of picture files."""

    names: tuple[str, ...]  # in Pillow; the first name is that of the reader
    suffixes: tuple[str, ...]  # the first suffix is the usual one
    begins: bytes  # pattern of the first bytes
    package: str | None = field(default=None, kw_only=True)  # that reads the format; None: Pillow does


# TGA has no magic number, so its pattern describes the whole header.
PICTURE_FORMATS = (
    Format(("JPEG", "MPO"), (".jpg", ".jpeg", ".jpe", ".jfif"), rb"\xff\xd8\xff"),
    Format(("PNG",), (".png", ".apng"), rb"\x89PNG\r\n\x1a\n"),
    Format(("GIF",), (".gif",), rb"GIF8[79]a"),
    Format(("BMP",), (".bmp",), rb"BM.{4}\0{4}"),
    Format(("PPM",), (".ppm", ".pgm", ".pbm", ".pnm"), rb"P[1-6]\s+[\d#]"),
    Format(("WEBP",), (".webp",), rb"RIFF.{4}WEBP"),
    Format(("TIFF",), (".tif", ".tiff"), rb"II[*+]\0|MM\0[*+]"),
    Format(("AVIF",), (".avif",), rb".{4}ftypavi[fs]"),
    Format(("JPEG2000",), (".jp2", ".j2k"), rb"\xff\x4f\xff\x51|\0\0\0\x0cjP {2}\r\n\x87\n"),
    Format(("QOI",), (".qoi",), rb"qoif"),
    Format(("DDS",), (".dds",), rb"DDS \x7c\0\0\0"),
    Format(("ICO",), (".ico",), rb"\0\0\x01\0[^\0]\0"),
    Format(("PCX",), (".pcx",), rb"\n[\0\2\3\5][\0\1][\1\2\4\x08]"),
    Format(("SGI",), (".sgi",), rb"\x01\xda[\0\1][\1\2]"),
    Format(("HEIF",), (".heic", ".heif"), rb".{4}ftyp(hei[cxms]|hev[cx]|mif1|msf1)", package="pillow-heif"),
    Format(("TGA",), (".tga",), rb".(\0[\2\3\n\v]\0{5}|\x01[\1\t].{4}[\x10\x18\x20]).{8}[\1\x08\x10\x18\x20][\0-\x3f]"),
)


def known() -> list[Format]:
    """Return the formats that can be read here."""
    from PIL import Image

    _add_readers()
    return [kind for kind in PICTURE_FORMATS if kind.package is None or kind.names[0] in Image.OPEN]


@cache
def _add_readers() -> None:
    """Give Pillow the readers of the packages that are installed."""
    with suppress(ImportError):
        import_module("pillow_heif.HeifImagePlugin")


def missing_package(suffix: str) -> str | None:
    """Return the package that reads files with this suffix, if it is not installed; None for any other suffix."""
    missing = [kind for kind in PICTURE_FORMATS if kind not in known()]
    return next((kind.package for kind in missing if suffix in kind.suffixes), None)


def suffixes() -> frozenset[str]:
    """Return the suffixes of files that can be read here, in lower case with their dot."""
    return frozenset(suffix for kind in known() for suffix in kind.suffixes)


def is_picture(head: bytes) -> bool:
    """Return whether a file whose first `HEAD` bytes are `head` has a format that can be read here."""
    return any(re.match(kind.begins, head, re.DOTALL) for kind in known())


def usual_suffix(name: str | None) -> str | None:
    """Return the usual suffix of the format that Pillow calls `name`; None for a format that is not known."""
    return next((kind.suffixes[0] for kind in PICTURE_FORMATS if name in kind.names), None)
