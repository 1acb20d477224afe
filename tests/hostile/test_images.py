"""Damaged and forged picture files: each becomes a picture of the right shape, or one message with its name."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from hookdiff import Feed, UserError
from hookdiff.data import Folder, Store, Transforms
from tests.conftest import check_facts, pixels, refused
from tests.hostile.test_cache import changes
from tests.hostile.test_run_dir import in_time

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # Pillow's, about broken files
KINDS = {
    "png": "PNG",
    "jpg": "JPEG",
    "webp": "WEBP",
    "bmp": "BMP",
    "tif": "TIFF",
    "gif": "GIF",
    "tiff": "TIFF",
    "jpeg": "MPO",
}
MODES = {"PNG": ["RGB", "L", "P", "RGBA", "I;16"], "TIFF": ["RGB", "L", "P", "F", "I", "CMYK"], "JPEG": ["RGB", "CMYK"]}
SIDES = [0, 1, 2, 255, 256, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1]


def picture(kind: str, mode: str) -> bytes:
    """Return a whole file."""
    out = io.BytesIO()
    image = Image.fromarray(pixels(3, 24))
    if mode == "I;16":
        image = Image.fromarray(numpy.arange(576, dtype=numpy.uint16).reshape(24, 24))
    else:
        image = (image.convert("L") if mode in ("I", "F") else image).convert(mode)
    options: dict[str, Any] = {"compression": "tiff_deflate"} if kind == "tiff" else {}
    image.save(out, KINDS[kind], **options)
    return out.getvalue()


def read(path: Path, store: Any, transforms: Transforms) -> None:
    """Read the only picture in a folder; assert that its sample is one, or that the message names the file."""
    with in_time():
        try:
            kept = Store(store=store, cache_dir=str(path.parent / "cache"))
            (batch,) = Feed(Folder(str(path.parent)), transforms, kept).unaugmented(torch.tensor([0]))
        except UserError as error:
            check_facts(error, path)
            return
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.shape[1] in (1, 3)
    if transforms.image_size:
        assert batch.inputs.shape[2:] == (transforms.image_size,) * 2
    assert -1 <= batch.inputs.min() <= batch.inputs.max() <= 1


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), store=st.sampled_from(["memory", "none", "disk"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_of_a_picture(tmp_path: Path, data: st.DataObject, kind: str, store: str) -> None:
    whole = picture(kind, data.draw(st.sampled_from(MODES.get(KINDS[kind], ["RGB"]))))
    for _ in range(data.draw(st.integers(1, 3))):
        if whole:
            whole = data.draw(changes(len(whole)))(whole)
    if whole and data.draw(st.booleans()):  # a number of a header becomes an absurd one
        at = data.draw(st.integers(0, min(200, len(whole) - 1)))
        number = data.draw(st.sampled_from(SIDES))
        whole = whole[:at] + struct.pack(data.draw(st.sampled_from("<>")) + "I", number) + whole[at + 4 :]
    path = tmp_path / f"a.{data.draw(st.sampled_from(sorted(KINDS)))}"
    sides, channels = st.none() | st.integers(2, 32), st.sampled_from([None, 1, 3])
    transforms = Transforms(image_size=data.draw(sides), upscale=True, channels=data.draw(channels))
    path.write_bytes(whole)
    try:
        read(path, store, transforms)
    finally:
        path.unlink()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, content: bytes, depth: int = 8, colour: int = 0) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@given(
    width=st.sampled_from(SIDES) | st.integers(0, 40),
    height=st.sampled_from(SIDES) | st.integers(0, 40),
    depth=st.sampled_from([1, 2, 4, 8, 16, 3, 255]),
    colour=st.integers(0, 7),
    content=st.binary(max_size=40) | st.sampled_from([zlib.compress(bytes(1 << 20)), zlib.compress(b"")]),
    image_size=st.sampled_from([None, 2, 8, 300]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_png_with_absurd_numbers_and_right_checksums(
    tmp_path: Path, width: int, height: int, depth: int, colour: int, content: bytes, image_size: int | None
) -> None:
    (tmp_path / "a.png").write_bytes(png(width, height, content, depth, colour))
    read(tmp_path / "a.png", "none", Transforms(image_size=image_size, upscale=True))


def test_a_picture_that_would_become_huge_is_refused(tmp_path: Path) -> None:
    """A line of 60 million pixels has 60 kB as a file, and 8 sides of it as high would have 15 GiB."""
    (tmp_path / "line.png").write_bytes(png(60_000_000, 1, zlib.compress(bytes(60_000_001))))
    with in_time(), refused(UserError, tmp_path / "line.png", "60000000 x 1"):
        Feed(Folder(str(tmp_path)), Transforms(image_size=8, upscale=True))


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "bomb.png").write_bytes(png(width, height, zlib.compress(bytes(1 << 24))))
    with in_time(), refused(UserError, tmp_path / "bomb.png"):
        Feed(Folder(str(tmp_path)), Transforms(image_size=8))


def test_a_text_that_is_a_bomb_is_refused_or_ignored(tmp_path: Path) -> None:
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))
    whole = png(8, 8, zlib.compress(bytes(72)))
    (tmp_path / "a.png").write_bytes(whole[:33] + text * 4 + whole[33:])
    read(tmp_path / "a.png", "memory", Transforms())


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_postscript_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tool, ran = tmp_path / "bin" / "gs", tmp_path / "ran"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntouch {ran}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with refused(UserError, tmp_path / "set" / name):
        Feed(Folder(str(tmp_path / "set")))
    assert not ran.exists()
