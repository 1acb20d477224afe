from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor

from hookdiff.authors.sheets import by_class, sheet
from hookdiff.log import Panel, Picture, as_pictures, padded, panel_layouts, save_grid, to_uint8

PADDING = 4  # white pixels around each picture


def saved(images: Tensor, path: Path, **options: Any) -> Tensor:
    """Save images, and return the grid as a viewer shows it: h w 3, uint8."""
    save_grid(images, path, **options)
    with Image.open(path) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB" if images.shape[1] == 3 else "L")
        return torch.from_numpy(numpy.array(picture.convert("RGB")))


def cell(grid: Tensor, row: int, column: int, height: int, width: int) -> Tensor:
    """Return a picture of the grid, c h w."""
    top, left = PADDING + row * (height + PADDING), PADDING + column * (width + PADDING)
    return grid[top : top + height, left : left + width].permute(2, 0, 1)


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_bytes_survive_a_round_trip_to_floats() -> None:
    values = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(values.float() / 127.5 - 1), values)


@given(value=st.floats(-3, 3, width=32))
def test_values_are_clipped_and_rounded(value: float) -> None:
    (pixel,) = to_uint8(torch.tensor([value])).tolist()
    assert abs(pixel - min(255, max(0, (value + 1) * 127.5))) <= 0.5001


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_can_be_shown(dtype: torch.dtype) -> None:
    images = torch.tensor([-1.0, 0.0, 1.0], dtype=dtype, requires_grad=True)
    assert to_uint8(images).tolist() == [0, 128, 255]


@pytest.mark.parametrize(("channels", "shape"), [(1, (2, 1, 4, 5)), (3, (2, 3, 4, 5)), (4, (8, 1, 4, 5))])
def test_pictures_have_one_or_three_channels(channels: int, shape: tuple[int, ...]) -> None:
    images = noise(2, channels, 4, 5)
    pictures = as_pictures(images)
    assert pictures.shape == shape
    assert torch.equal(pictures.flatten(), images.flatten())
    assert (pictures is images) == (channels != 4)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), st.sampled_from([1, 3]))
def test_images_of_several_sizes_are_centred_on_white(sizes: list[tuple[int, int]], channels: int) -> None:
    images = [noise(channels, *size).clamp(max=254) for size in sizes]
    stack = padded(images)
    assert stack.shape == (len(sizes), channels, max(height for height, _ in sizes), max(width for _, width in sizes))
    for row, image, (height, width) in zip(stack, images, sizes, strict=True):
        (top, bottom), (left, right) = (
            (around.min().item(), around.max().item() + 1) for around in (row[0] < 255).nonzero().T
        )
        assert torch.equal(row[:, top:bottom, left:right], image)
        assert (row < 255).sum() == channels * height * width
        assert 0 <= stack.shape[2] - bottom - top <= 1
        assert 0 <= stack.shape[3] - right - left <= 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_at_scale_1_every_pixel_is_exact(tmp_path: Path, channels: int, as_bytes: bool) -> None:
    images = noise(6, channels, 3, 5)
    inputs = images if as_bytes else images.float() / 127.5 - 1
    grid = saved(inputs, tmp_path / "grid.png", columns=2, scale=1)
    assert grid.shape == (3 * (3 + PADDING) + PADDING, 2 * (5 + PADDING) + PADDING, 3)
    for index, image in enumerate(images):
        shown = cell(grid, *divmod(index, 2), 3, 5)
        assert torch.equal(shown, image.expand(3, 3, 5))
    assert grid[:PADDING].min() == grid[:, -PADDING:].min() == 255


@pytest.mark.parametrize(("num", "rows", "columns"), [(4, 2, 2), (5, 2, 3), (7, 3, 3), (9, 3, 3), (10, 3, 4)])
def test_the_grid_is_as_square_as_possible(tmp_path: Path, num: int, rows: int, columns: int) -> None:
    grid = saved(noise(num, 1, 8, 8), tmp_path / "grid.png", scale=1)
    assert grid.shape[:2] == (rows * (8 + PADDING) + PADDING, columns * (8 + PADDING) + PADDING)


@pytest.mark.parametrize(("width", "shown"), [(8, 64), (24, 48), (32, 64), (64, 64), (100, 100)])
def test_small_images_are_enlarged_to_about_64_pixels(tmp_path: Path, width: int, shown: int) -> None:
    grid = saved(noise(4, 3, 8, width), tmp_path / "grid.png")
    assert grid.shape[:2] == (2 * (8 * shown // width + PADDING) + PADDING, 2 * (shown + PADDING) + PADDING)


def test_enlarging_keeps_flat_areas_and_does_not_overshoot(tmp_path: Path) -> None:
    images = torch.full((4, 3, 8, 8), -1.0)
    images[1], images[2], images[3, :, :, 4:] = 0.0, 1.0, 1.0
    grid = saved(images, tmp_path / "grid.png")
    for index, grey in enumerate((0, 128, 255)):
        assert cell(grid, *divmod(index, 2), 64, 64).eq(grey).all()
    edge = cell(grid, 1, 1, 64, 64)
    assert (int(edge[:, :, :24].max()), int(edge[:, :, 40:].min())) == (0, 255)


def test_latents_are_shown_side_by_side(tmp_path: Path) -> None:
    latents = noise(2, 4, 8, 8)
    grid = saved(latents, tmp_path / "grid.png", columns=4, scale=1)
    for row in range(2):
        for column in range(4):
            assert torch.equal(cell(grid, row, column, 8, 8)[0], latents[row, column])


def test_one_image_is_a_grid_too(tmp_path: Path) -> None:
    image = noise(1, 1, 8, 8)
    assert saved(image, tmp_path / "grid.png", scale=1).shape == (8, 8, 3)


def test_a_caption_stands_below_each_image(tmp_path: Path) -> None:
    images = noise(5, 3, 20, 20)
    plain = saved(images, tmp_path / "plain.png", columns=3, scale=1)
    each = saved(images, tmp_path / "each.png", columns=3, scale=1, captions=["a", "a long name", "c", "d", "e"])
    line = (each.shape[0] - plain.shape[0]) // 2
    assert line > 8
    assert torch.equal(cell(each, 0, 1, 20, 20), images[1])
    below = each[PADDING + 20 : PADDING + 20 + line]
    for left in (PADDING, 2 * PADDING + 20, 3 * PADDING + 40):
        assert (below[:, left : left + 20] < 128).any()
        assert (below[:, left - PADDING : left] == 255).all()  # a long name stays in its column


def test_a_long_caption_is_cut_in_the_middle(tmp_path: Path) -> None:
    image = noise(1, 1, 64, 64)
    captions = (
        "first words, and the last",
        "first words or the last",
        "other words, and the last",
        "first words, and no end",
    )
    one, middle, begin, end = (saved(image, tmp_path / "one.png", scale=1, captions=[text]) for text in captions)
    assert torch.equal(one, middle)
    assert not torch.equal(one, begin)
    assert not torch.equal(one, end)


def pixels(picture: Picture) -> Tensor:
    """Return the pixels of a picture as n rows of RGB."""
    return torch.from_numpy(numpy.array(picture.as_pillow().convert("RGB")))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=4),
    abreast=st.none() | st.integers(1, 3),
    named=st.booleans(),
)
def test_the_info_says_where_each_image_is(sizes: list[tuple[int, int]], abreast: int | None, named: bool) -> None:
    images = [noise(num, 1, 8, 9) for num, _ in sizes]
    names = ["row", "a much longer name than others"] if named else []
    panels = [
        Panel(found, columns, title=f"panel {k}" * named, row_names=names, column_names=names)
        for k, (found, (_, columns)) in enumerate(zip(images, sizes, strict=True))
    ]
    picture = sheet(panels, scale=1, abreast=abreast, info={"seed": 7})
    assert picture.info["seed"] == 7
    shown = pixels(picture)
    found_places = list(panel_layouts(picture.info))
    assert [place.title for place in found_places] == [panel.title for panel in panels]
    for place, panel_images in zip(found_places, images, strict=True):
        for number, image in enumerate(panel_images):
            left, top, right, bottom = place.box(number)
            assert torch.equal(shown[top:bottom, left:right, 0], image[0])
        left, top, right, bottom = place.whole
        assert 0 <= left < right <= shown.shape[1]
        assert 0 <= top < bottom <= shown.shape[0]


def test_a_title_and_the_names_of_rows_and_columns_are_drawn_outside_of_the_images() -> None:
    images = noise(4, 3, 16, 16)
    plain = sheet([Panel(images, 2)], scale=1)
    for name in ("title", "row_names", "column_names"):
        named = sheet([Panel(images, 2, **{name: "cat" if name == "title" else ["cat", "dog"]})], scale=1)
        (before,), (after,) = panel_layouts(plain.info), panel_layouts(named.info)
        left, top = after.left - before.left, after.top - before.top
        assert (left > 0, top > 0) == (name == "row_names", name != "row_names")
        shown = pixels(named)
        margin = shown[:, : after.left] if left else shown[: after.top]
        assert (margin < 128).any()


def test_images_of_a_class_stand_in_rows_beside_its_name() -> None:
    labels = [0, 2, 0, 2, 0, -1]
    images = noise(6, 1, 8, 8)
    panel = by_class(images, labels, ["cat", "dog", "cow"], columns=2)
    assert (list(panel.row_names), panel.columns) == (["cat", "", "cow", "-"], 2)
    assert [int(row) for row in range(8) if (panel.images[row] == 255).all()] == [3, 7]  # rows are filled up with white
    for row, number in enumerate([0, 2, 4, None, 1, 3, 5, None]):
        assert number is None or torch.equal(panel.images[row], images[number])
    square = by_class(noise(64, 1, 8, 8), [k % 4 for k in range(64)], list("abcd"))
    assert (len(square.images), square.columns) == (64, 8)
    latents = noise(3, 4, 8, 8)  # a picture of each channel
    panel = by_class(latents, [1, 0, 1], ["cat", "dog"], columns=8)
    assert list(panel.row_names) == ["dog", "cat"]
    assert torch.equal(panel.images[:8, 0], latents[[0, 2]].flatten(0, 1))
    assert torch.equal(panel.images[8:12, 0], latents[1])
