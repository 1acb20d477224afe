import io
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from hookdiff import Samples, UserError
from hookdiff.authors.animation import ANIMATION_FORMATS, save_animation
from hookdiff.log import Picture, panel_layouts, read_info, show
from tests.conftest import refused

GREY = numpy.arange(12, dtype=numpy.uint8).reshape(3, 4)


@pytest.mark.parametrize("pixels", [GREY, numpy.stack([GREY] * 3, axis=-1)])
def test_a_file_has_the_pixels_and_the_info(tmp_path: Path, pixels: numpy.ndarray) -> None:
    path = tmp_path / "new" / "x.png"
    info = {"seed": 1, "names": ["caf\u00e9", "\u732b"], "scale": 2.5}
    Picture(pixels, {"seed": 0}).with_info(**info).save(path)
    with Image.open(path) as image:
        assert read_info(image) == info
        assert (numpy.array(image) == pixels).all()
    assert [file.name for file in path.parent.iterdir()] == ["x.png"]


def test_the_info_is_strict_json(tmp_path: Path) -> None:
    info = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (-math.inf, 2)}, "e": "\ud800", "f": True}
    Picture(GREY, info).save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        text = image.text["hookdiff"]  # type: ignore[attr-defined]
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read == {"a": None, "b": [None, 1.5], "c": {"d": [None, 2]}, "e": "\ud800", "f": True}


@pytest.mark.parametrize("text", ["", "no json", "[1]", "{" * 5000, None])
def test_a_file_of_another_program_has_no_info(tmp_path: Path, text: str | None) -> None:
    from PIL.PngImagePlugin import PngInfo

    chunks = PngInfo()
    if text is not None:
        chunks.add_itxt("hookdiff", text)
    Image.fromarray(GREY).save(tmp_path / "x.png", pnginfo=chunks)
    with Image.open(tmp_path / "x.png") as image:
        assert read_info(image) == {}


@pytest.mark.parametrize("panels", [None, 3, [1], [{"title": "x"}], [{}], "abc"])
def test_places_of_another_program_are_left_out(panels: object) -> None:
    assert list(panel_layouts({"panels": panels})) == []
    assert json.dumps(list(panel_layouts({}))) == "[]"


@given(st.data())
def test_a_place_is_read_only_as_it_may_have_been_written(data: st.DataObject) -> None:
    place = {"title": "x", "left": 1, "top": 2, "width": 3, "height": 4, "right": 5, "down": 6, "columns": 2, "num": 3}
    (found,) = panel_layouts({"panels": [place]})
    assert found.whole == (1, 2, 9, 12)
    assert found.is_inside((9, 12))
    assert not found.is_inside((8, 12))
    assert not found.is_inside((9, 11))
    name = data.draw(st.sampled_from(list(place)))
    wrong = data.draw(st.none() | st.integers(max_value=-1) | st.integers(2**24) | st.floats() | st.lists(st.none()))
    assert list(panel_layouts({"panels": [{**place, name: wrong}]})) == []


@pytest.mark.parametrize("kind", ANIMATION_FORMATS)
def test_an_animation_repeats_its_frames_and_shows_the_last_one_longer(tmp_path: Path, kind: str) -> None:
    frames = [Image.fromarray(numpy.full((8, 8), 60 * k, numpy.uint8)) for k in range(4)]
    path = tmp_path / f"x.{kind}"
    save_animation(frames, path, frame=100, last=900)
    with Image.open(path) as image:
        shown = []
        for number in range(image.n_frames):
            image.seek(number)
            shown.append((int(numpy.array(image.convert("L"))[4, 4]), image.info["duration"]))
        assert image.info["loop"] == 0
    assert [duration for _, duration in shown] == [100, 100, 100, 900]
    assert [grey for grey, _ in shown] == pytest.approx([0, 60, 120, 180], abs=4)


@pytest.mark.parametrize("size", [(20_000, 50), (3, 40_000)])
@pytest.mark.parametrize("kind", ANIMATION_FORMATS)
def test_an_animation_of_large_frames_is_made_smaller(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    frames = [Image.new("L", size, grey) for grey in (0, 200)]
    save_animation(frames, tmp_path / f"x.{kind}")
    with Image.open(tmp_path / f"x.{kind}") as image:
        assert image.n_frames == 2  # type: ignore[attr-defined]
        assert max(image.size) == 16_383
        assert min(image.size) == max(1, min(size) * 16_383 // max(size))


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (torch.zeros(4, 1, 70, 70), "152x152"),
        (torch.zeros(3, 70, 70, dtype=torch.uint8), "70x70x3"),
        (torch.zeros(70, 70), "70x70"),
        ([torch.zeros(1, 70, 70), torch.ones(70, 70)], "78x152"),
        (Samples(torch.zeros(4, 1, 70, 70), "ema"), "152x152"),
    ],
)
def test_a_notebook_shows_images_as_a_png_file(images: Any, expected: str, tmp_path: Path) -> None:
    picture = show(images)
    shown = Image.open(io.BytesIO(picture._repr_png_()))
    assert "x".join(map(str, numpy.asarray(shown).shape)) == expected
    assert read_info(shown) == picture.info
    assert repr(picture).startswith(f"Picture(pixels={expected}, ")
    picture.save(str(tmp_path / "x.png"))
    assert numpy.array_equal(numpy.asarray(Image.open(tmp_path / "x.png")), picture.pixels)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (torch.zeros(3), ["(3,)", "n c h w"]),
        (torch.zeros(0, 1, 8, 8), ["(0, 1, 8, 8)"]),
        ([], ["a list"]),
        ([torch.zeros(8, 8), torch.zeros(4, 4)], ["a list"]),
        (Samples(torch.zeros(0, 1, 8, 8), "ema"), ["a Samples"]),
        ("x.png", ["a str"]),
    ],
)
def test_what_is_no_image_is_refused(given: Any, facts: list[str]) -> None:
    with refused(UserError, *facts):
        show(given)
