import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from torch import Tensor

from hookdiff import UserError
from hookdiff.images import Folder, Store, Transforms, decode, feed_of, num_channels, upright_size
from tests.conftest import refused

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F")
FORMATS = ("png", "jpg", "webp", "bmp", "tif", "gif")


def picture(mode: str, width: int, height: int, seed: int) -> Image.Image:
    draw = numpy.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 65536, (height, width)).astype(numpy.uint16))
    if mode == "I":
        return Image.fromarray(draw.integers(0, 65536, (height, width)).astype(numpy.int32))
    if mode == "F":
        return Image.fromarray(draw.random((height, width), dtype=numpy.float32))
    bands = [Image.fromarray(draw.integers(0, 256, (height, width), dtype=numpy.uint8)) for _ in range(4)]
    direct = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "HSV": 3}
    if mode in direct:
        return Image.merge(mode, bands[: direct[mode]])
    return bands[0].convert(mode) if mode == "1" else Image.merge("RGB", bands[:3]).convert("P").convert(mode)


@contextmanager
def suppress_if_it_names(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if str(path) not in str(error):
            raise


@given(
    mode=st.sampled_from(MODES),
    kind=st.sampled_from(FORMATS),
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    orientation=st.sampled_from([None, 1, 3, 6, 8]),
    keep=st.none() | st.floats(0, 1),
    channels=st.sampled_from([None, 1, 3]),
    image_size=st.none() | st.integers(2, 20),
    store=st.sampled_from(["memory", "none"]),
    seed=st.integers(0, 9),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # from Pillow, about broken files
def test_any_file_becomes_a_picture_or_an_error_that_names_it(
    tmp_path: Path,
    mode: str,
    kind: str,
    width: int,
    height: int,
    orientation: int | None,
    keep: float | None,
    channels: Any,
    image_size: int | None,
    store: Any,
    seed: int,
) -> None:
    image, buffer, options = picture(mode, width, height, seed), io.BytesIO(), {}
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    try:
        image.save(buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(kind, kind.upper()), **options)
    except (OSError, ValueError, KeyError):
        return  # the format cannot hold the mode
    for earlier in tmp_path.iterdir():
        earlier.unlink()
    path = tmp_path / f"one.{kind}"
    content = buffer.getvalue()
    path.write_bytes(content if keep is None else content[: int(keep * len(content))])
    transforms = Transforms(image_size=image_size, upscale=True, channels=channels)
    feed = batch = None
    with suppress_if_it_names(path):
        feed = feed_of(Folder(str(tmp_path)), transforms=transforms, store=Store(store=store))
        (batch,) = feed.unaugmented(torch.tensor([0]))
    if feed is None or batch is None:
        return
    turned = orientation in (6, 8) and kind in ("jpg", "png", "webp", "tif")
    sides = (image_size, image_size) if image_size else (width, height) if turned else (height, width)
    assert tuple(batch.inputs.shape[2:]) == sides
    assert batch.inputs.shape[1] == (channels or batch.inputs.shape[1]) in (1, 3)
    assert batch.inputs.dtype == torch.float32
    assert -1 <= batch.inputs.min() <= batch.inputs.max() <= 1
    assert feed.shape == tuple(batch.inputs.shape[1:])


def pixels(image: Image.Image, channels: int | None = None, background: str = "white") -> Tensor:
    return torch.from_numpy(numpy.array(decode(image, channels, background)))


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    deep = numpy.array([[0, 128, 129, 257, 32768, 65406, 65407, 65535]], dtype=numpy.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    expected = torch.tensor([[round(int(value) * 255 / 65535) for value in deep[0]]])
    assert expected.tolist() == [[0, 0, 1, 1, 128, 254, 255, 255]]
    assert torch.equal(pixels(Image.open(tmp_path / "deep.png")), expected.to(torch.uint8))
    assert torch.equal(pixels(Image.fromarray(deep.astype(numpy.int32))), expected.to(torch.uint8))


def test_floats_are_read_as_zero_to_one() -> None:
    image = Image.fromarray(numpy.array([[0, 0.2, 0.5, 1]], dtype=numpy.float32))
    assert pixels(image).tolist() == [[0, 51, 128, 255]]


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ([[0.0, 1.5]], (0.0, 1.5, 0, 1)),
        ([[0.0, numpy.nan]], ("nan", 0, 1)),
        ([[-1, 5]], (-1, 5, 0, 65535)),
        ([[0, 65536]], (0, 65536, 65535)),
    ],
)
def test_values_of_no_known_range_are_refused(values: Any, facts: Any) -> None:
    kind = numpy.float32 if isinstance(values[0][0], float) else numpy.int32
    with refused(ValueError, *facts):
        decode(Image.fromarray(numpy.array(values, dtype=kind)), None, "white")


@pytest.mark.parametrize(("background", "colour"), [("white", (255, 255, 255)), ("#102030", (16, 32, 48))])
@pytest.mark.parametrize("kind", ["png", "webp", "tif"])
def test_the_background_shows_through(tmp_path: Path, background: str, colour: Any, kind: str) -> None:
    rgba = numpy.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=numpy.uint8)
    rgba[0, :, 3], rgba[1, :, 3] = 0, 255
    Image.fromarray(rgba).save(tmp_path / f"a.{kind}", **({"lossless": True, "exact": True} if kind == "webp" else {}))
    alpha = torch.from_numpy(rgba[..., 3:]).double() / 255
    expected = torch.from_numpy(rgba[..., :3]) * alpha + torch.tensor(colour) * (1 - alpha)
    found = pixels(Image.open(tmp_path / f"a.{kind}"), background=background)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1)
    assert found[0].unique(dim=0).tolist() == [list(colour)]


def test_grey_with_transparency_stays_grey(tmp_path: Path) -> None:
    bands = [Image.new("L", (2, 1), 100), Image.fromarray(numpy.array([[0, 255]], numpy.uint8))]
    Image.merge("LA", bands).save(tmp_path / "a.png")
    assert pixels(Image.open(tmp_path / "a.png"), background="black").tolist() == [[0, 100]]
    Image.fromarray(numpy.array([[7, 9]], numpy.uint8)).save(tmp_path / "b.png", transparency=7)
    assert pixels(Image.open(tmp_path / "b.png")).tolist() == [[255, 9]]


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_comes_out_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    # The pixels that a camera stores for the upright picture in each orientation (Exif 2.3, 4.6.4).
    upright = numpy.zeros((16, 24), numpy.uint8)
    upright[:8, :8], upright[:8, 16:] = 250, 120
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"webp": {"lossless": True}, "jpg": {"quality": 95}}.get(kind, {})
    Image.fromarray(numpy.ascontiguousarray(stored)).save(tmp_path / f"a.{kind}", exif=exif, **options)
    with Image.open(tmp_path / f"a.{kind}") as image:
        assert upright_size(image) == (24, 16)
        found = pixels(image, channels=1)
    assert int((found.int() - torch.from_numpy(upright).int()).abs().max()) <= 3


@pytest.mark.parametrize("kind", ["png", "gif", "webp", "tif"])
def test_the_first_frame_of_an_animation_is_read(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), (value, value, value)) for value in (10, 200)]
    frames[0].save(tmp_path / f"a.{kind}", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / f"a.{kind}") as image:
        assert int(pixels(image, channels=1).float().mean().round()) in range(8, 13)


@pytest.mark.parametrize("mode", MODES)
def test_the_header_gives_the_channels(mode: str) -> None:
    image = picture(mode, 5, 3, 0)
    if mode == "LAB":
        return  # Pillow converts it with a profile only
    assert decode(image.copy(), None, "white").mode == {1: "L", 3: "RGB"}[num_channels(mode)]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0broken", b"Exif\0\0II*\0\xff\xff\xff\xff", b""])
def test_a_picture_with_a_broken_exif_header_is_read(tmp_path: Path, exif: bytes) -> None:
    Image.new("L", (8, 4), 77).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        assert (upright_size(image), pixels(image).unique().tolist()) == ((8, 4), [77])
