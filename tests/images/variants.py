"""Files of one picture in many variants: modes, depths, meanings of pixels, transparency and orientation.

Most are written here byte by byte, because Pillow cannot write them.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
from PIL import Image

SIDE = 16
_DRAW = numpy.random.default_rng(0)
RGB = numpy.kron(_DRAW.integers(0, 256, (2, 2, 3)), numpy.ones((8, 8, 1), int))  # the blocks survive a JPEG
ALPHA = numpy.kron(_DRAW.integers(1, 255, (4, 4)), numpy.ones((4, 4), int))
LEVELS = numpy.arange(SIDE * SIDE).reshape(SIDE, SIDE) * 37
INK = numpy.kron(_DRAW.integers(0, 256, (2, 2, 4)), numpy.ones((8, 8, 1), int))
CMYK = numpy.rint((255 - INK[..., :3]) * (255 - INK[..., 3:]) / 255)  # as colours
DEEP = _DRAW.integers(0, 65536, (SIDE, SIDE, 3))

Variant = tuple[str, bytes, Any]  # name of the file, its bytes, and h w 3 or h w of the 8-bit twin; None: refused


def over_white(colours: Any, alpha: Any) -> Any:
    colours = colours if colours.ndim == 3 else colours[..., None]
    return colours * (alpha[..., None] / 255) + 255 * (1 - alpha[..., None] / 255)


def deep(values: Any, bits: int) -> Any:
    """Return values of 8 bits in `bits` bits."""
    return numpy.rint(values * (2**bits - 1) / 255).astype(numpy.int64)


def grey(bits: int) -> Any:
    """Return a grey picture of 8 bits that has only values of `bits` bits."""
    most = 2 ** min(bits, 8) - 1
    return LEVELS % (most + 1) * 255 // most


def packed(rows: Any, bits: int, order: str = ">") -> bytes:
    if bits >= 8 and bits != 12:
        return bytes(rows.astype(f"{order}u{bits // 8}").tobytes())
    texts = ("".join(f"{value:0{bits}b}" for value in row.reshape(-1)) for row in rows)
    return b"".join(int(text, 2).to_bytes(len(text) // 8, "big") for text in texts)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(rows: Any, bits: int, colour: int, *extra: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, bits, colour, 0, 0, 0))
    raw = b"".join(b"\0" + packed(row[None], bits) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def tiff(raw: bytes, bits: int, samples: int, photometric: int, order: str = "<", **more: list[int]) -> bytes:
    """Return a TIFF. `more` has further tags, such as t274=[6]."""
    tags = {256: [SIDE], 257: [SIDE], 258: [bits] * samples, 259: [1], 262: [photometric], 273: [8], 277: [samples]}
    tags |= {278: [SIDE], 279: [len(raw)], **{int(name[1:]): values for name, values in more.items()}}
    if tags[259] == [8]:
        raw = zlib.compress(raw)
        tags[279] = [len(raw)]
    raw += bytes(len(raw) % 2)
    table, beyond, start = b"", b"", 8 + len(raw) + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        kind, code = ("I", 4) if tag in (273, 279) else ("H", 3)
        content = struct.pack(f"{order}{len(values)}{kind}", *values)
        if len(content) > 4:
            place, beyond = start + len(beyond), beyond + content
            content = struct.pack(f"{order}I", place)
        table += struct.pack(f"{order}HHI", tag, code, len(values)) + content.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(raw))
    return head + raw + struct.pack(f"{order}H", len(tags)) + table + bytes(4) + beyond


def tga(kind: int, bits: int, raw: bytes, alpha_bits: int, palette: bytes = b"", depth: int = 0) -> bytes:
    colours = len(palette) * 8 // depth if depth else 0
    head = (0, bool(depth), kind, 0, colours, depth, 0, 0, SIDE, SIDE, bits, 0x20 | alpha_bits)
    return struct.pack("<BBBHHBHHHHBB", *head) + palette + raw


def jpeg2000(values: Any, bits: int) -> bytes:
    """Return a lossless file of `values` of `bits` bits: Pillow writes 8 or 16, and the header is changed."""
    stored = (values - 2 ** (bits - 1) + (128 if bits <= 8 else 32768)).astype("u1" if bits <= 8 else "u2")
    content = bytearray(saved(Image.fromarray(stored), "JPEG2000", irreversible=False))
    content[content.find(b"\xff\x4f\xff\x51") + 42] = content[content.find(b"ihdr") + 14] = bits - 1
    return bytes(content)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def of_bytes(values: Any, mode: str | None = None) -> Image.Image:
    image = Image.fromarray(numpy.ascontiguousarray(values.astype(numpy.uint8)))
    return image if mode is None else Image.frombytes(mode, image.size, image.tobytes())


def upright(values: Any, orientation: int) -> Any:
    """Return how a stored picture looks (Exif 2.3, 4.6.4)."""
    values = values if orientation < 5 else values.swapaxes(0, 1)
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    return numpy.flip(values, flips)


def of_png() -> Iterator[Variant]:
    for bits in (1, 2, 4, 8, 16):
        twin = grey(bits)
        stored = deep(twin, bits)
        yield f"grey-{bits}", png(stored, bits, 0), twin
        for name, key in {"": twin[0, 1], "-of-0": twin.min()}.items():
            keyed = png(stored, bits, 0, chunk(b"tRNS", struct.pack(">H", int(deep(key, bits)))))
            yield f"grey-{bits}-trns{name}", keyed, over_white(twin, 255 * (twin != key)) if bits < 16 else None
        if bits < 16:
            colours, alphas = _DRAW.integers(0, 256, (2**bits, 3)), _DRAW.integers(0, 256, 2**bits)
            place = LEVELS % 2**bits
            table = chunk(b"PLTE", packed(colours, 8))
            yield f"palette-{bits}", png(place, bits, 3, table), colours[place]
            twin = over_white(colours[place], alphas[place])
            yield f"palette-{bits}-trns", png(place, bits, 3, table, chunk(b"tRNS", bytes(alphas.tolist()))), twin
            twin = over_white(colours[place], 255 * (place > 0))
            yield f"palette-{bits}-trns-of-0", png(place, bits, 3, table, chunk(b"tRNS", b"\0")), twin
        if bits >= 8:
            twin, alpha = grey(bits), deep(ALPHA, bits)
            yield f"grey-alpha-{bits}", png(numpy.dstack([stored, alpha]), bits, 4), over_white(twin, ALPHA)
            yield f"rgb-{bits}", png(deep(RGB, bits), bits, 2), RGB
            yield f"rgb-alpha-{bits}", png(numpy.dstack([deep(RGB, bits), alpha]), bits, 6), over_white(RGB, ALPHA)
    yield "rgb-16-trns", png(DEEP, 16, 2, chunk(b"tRNS", struct.pack(">HHH", *DEEP[0, 0].tolist()))), None


def of_tiff() -> Iterator[Variant]:
    for order, packing in (("<", 1), (">", 1), ("<", 8), (">", 8)):
        name, how = f"{'II' if order == '<' else 'MM'}-{packing}", {"order": order, "t259": [packing]}
        for bits in (1, 2, 4, 8, 12, 16):
            twin = grey(bits)
            for white in (True, False):  # as photometric interpretation
                stored = deep(twin, bits) if white else 2**bits - 1 - deep(twin, bits)
                found: Any = None if (bits, order) == (12, ">") or (bits, white) == (12, False) else twin
                found = None if (bits, order, white) == (16, ">", False) else found
                raw = packed(stored, bits, order)
                yield f"{name}-grey-{bits}-{white}", tiff(raw, bits, 1, int(white), **how), found
                if bits in (8, 16):
                    signed = (deep(twin, bits) // 2).astype(f"{order}i{bits // 8}").tobytes()
                    yield f"{name}-signed-{bits}-{white}", tiff(signed, bits, 1, int(white), t339=[2], **how), None
        for white in (True, False):
            floats = numpy.abs((not white) - grey(8) / 255).astype(f"{order}f4")
            yield f"{name}-float-{white}", tiff(floats.tobytes(), 32, 1, int(white), t339=[3], **how), grey(8)
            binary = numpy.abs((not white) - grey(1) / 255).astype(f"{order}f4")
            yield f"{name}-float-binary-{white}", tiff(binary.tobytes(), 32, 1, int(white), t339=[3], **how), grey(1)
        yield f"{name}-half", tiff((grey(8) / 255).astype(f"{order}f2").tobytes(), 16, 1, 1, t339=[3], **how), None
        for bits in (8, 16):
            raw = packed(deep(RGB, bits), bits, order)
            yield f"{name}-rgb-{bits}", tiff(raw, bits, 3, 2, **how), RGB
            for extra, twin in ((0, RGB), (1, over_white(RGB, ALPHA)), (2, over_white(RGB, ALPHA))):
                colours = RGB * ALPHA[..., None] / 255 if extra == 1 else RGB
                raw = packed(numpy.dstack([deep(colours, bits), deep(ALPHA, bits)]), bits, order)
                yield f"{name}-rgb-{bits}-extra-{extra}", tiff(raw, bits, 4, 2, t338=[extra], **how), twin
            yield f"{name}-cmyk-{bits}", tiff(packed(deep(INK, bits), bits, order), bits, 4, 5, **how), CMYK
            if packing == 1:
                raw = packed(deep(RGB, bits).transpose(2, 0, 1).reshape(-1, SIDE), bits, order)
                size = len(raw) // 3
                planes = {"t273": [8, 8 + size, 8 + 2 * size], "t279": [size] * 3, "t284": [2]}
                yield f"{name}-rgb-{bits}-planes", tiff(raw, bits, 3, 2, **how, **planes), RGB
        for extra, colours in ((0, grey(8)), (1, grey(8) * ALPHA / 255), (2, grey(8))):
            raw, twin = packed(numpy.rint(numpy.dstack([colours, ALPHA])), 8), over_white(grey(8), ALPHA)
            yield f"{name}-grey-extra-{extra}", tiff(raw, 8, 2, 1, t338=[extra], **how), twin if extra else grey(8)
        for bits in (1, 2, 4, 8):
            colours, place = _DRAW.integers(0, 256, (2**bits, 3)), LEVELS % 2**bits
            for kind, scale in (("palette", 257), ("palette-of-bytes", 1)):
                made = tiff(packed(place, bits), bits, 1, 3, t320=(scale * colours.T).reshape(-1).tolist(), **how)
                yield f"{name}-{kind}-{bits}", made, colours[place]
    for orientation in range(1, 9):
        turned = upright(grey(8), orientation)
        raw, white = packed(deep(255 - grey(8), 16), 16, "<"), {"t274": [orientation]}
        yield f"turned-white-{orientation}", tiff(raw, 16, 1, 0, **white), turned
        yield f"turned-12-{orientation}", tiff(packed(deep(grey(8), 12), 12), 12, 1, 1, **white), turned
    yield "subsampled", tiff(bytes(SIDE * SIDE * 3), 8, 3, 6), None


def of_others() -> Iterator[Variant]:
    for most in (1, 3, 100, 255, 1023, 4095, 65535):
        kind = ">u2" if most > 255 else "u1"
        for number, values in (("P5", LEVELS % (most + 1)), ("P6", DEEP % (most + 1))):
            head = f"{number} {SIDE} {SIDE} {most}\n".encode()
            yield f"{number}-{most}.pnm", head + values.astype(kind).tobytes(), values * 255 / most
    yield "bits.pbm", f"P4 {SIDE} {SIDE}\n".encode() + packed(1 - grey(1) // 255, 1), grey(1)
    bgra = packed(numpy.dstack([RGB[..., ::-1], ALPHA]), 8)
    yield "32-without-alpha.tga", tga(2, 32, bgra, 0), RGB
    yield "32.tga", tga(2, 32, bgra, 8), over_white(RGB, ALPHA)
    yield "grey-alpha.tga", tga(3, 16, packed(numpy.dstack([grey(8), ALPHA]), 8), 8), over_white(grey(8), ALPHA)
    five, bit = RGB >> 3, ALPHA & 1
    raw = (bit << 15 | five[..., 0] << 10 | five[..., 1] << 5 | five[..., 2]).astype("<u2").tobytes()
    yield "16-without-alpha.tga", tga(2, 16, raw, 0), five * 255 / 31
    yield "16.tga", tga(2, 16, raw, 1), over_white(five * 255 / 31, bit * 255)
    table = (numpy.arange(16) << 10 | 0x8000).astype("<u2").tobytes()
    place = LEVELS % 16
    red = numpy.dstack([place * 255 / 31, place * 0, place * 0])
    yield "palette.tga", tga(1, 8, packed(place, 8), 0, table, 16), red
    for bits in (1, 2, 4, 8, 12, 16):
        yield f"{bits}.jp2", jpeg2000(deep(grey(bits), bits), bits), grey(bits)
    for bytes_each in (1, 2):
        head = struct.pack(">HBBHHHHII", 474, 0, bytes_each, 3, SIDE, SIDE, 4, 0, 255).ljust(512, b"\0")
        four = numpy.dstack([RGB, ALPHA])[::-1].transpose(2, 0, 1) * (257 if bytes_each == 2 else 1)
        yield f"{bytes_each}.sgi", head + four.astype(f">u{bytes_each}").tobytes(), over_white(RGB, ALPHA)
    colour, see_through = of_bytes(RGB), of_bytes(numpy.dstack([RGB, ALPHA]))
    (_, inner, twin), *_ = [one for one in of_png() if one[0] == "rgb-alpha-8"]
    yield "png.ico", struct.pack("<HHHBBBBHHII", 0, 1, 1, SIDE, SIDE, 0, 0, 1, 32, len(inner), 22) + inner, twin
    for kind, suffix, options in (
        ("WEBP", "webp", {"lossless": True, "exact": True}),
        ("QOI", "qoi", {}),
        ("DDS", "dds", {}),
        ("ICO", "ico", {"sizes": [(SIDE, SIDE)]}),
        ("AVIF", "avif", {"quality": 100, "subsampling": "4:4:4"}),
    ):
        yield f"rgb.{suffix}", saved(colour, kind, **options), RGB
        yield f"rgba.{suffix}", saved(see_through, kind, **options), over_white(RGB, ALPHA)
    yield "rgb.jpg", saved(colour, "JPEG", quality=100, subsampling=0), RGB
    yield "of-rgb.jpg", saved(colour, "JPEG", quality=100, keep_rgb=True), RGB
    yield "cmyk.jpg", saved(of_bytes(INK, "CMYK"), "JPEG", quality=100), CMYK
    content = saved(of_bytes(255 - INK, "CMYK"), "JPEG", quality=100)
    at = content.find(b"\xff\xee")  # the segment in which Adobe's programs say that they invert
    yield "not-adobe.jpg", content[:at] + content[at + 16 :], CMYK
    ycc = numpy.asarray(of_bytes(INK[..., :3]).convert("YCbCr"))
    content = saved(of_bytes(numpy.dstack([255 - ycc, INK[..., 3]]), "CMYK"), "JPEG", quality=100)
    yield "ycck.jpg", content[: at + 15] + b"\2" + content[at + 16 :], CMYK


def variants() -> Iterator[Variant]:
    """Yield the name of each file, its bytes, and its twin of 8 bits in front of white; None if it has no meaning."""
    for kind, found in (("png", of_png()), ("tif", of_tiff())):
        for name, content, twin in found:
            yield f"{name}.{kind}", content, twin
    yield from of_others()
