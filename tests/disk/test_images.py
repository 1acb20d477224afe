from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import as_pictures, check_writable, save_grid
from hookdiff.disk.images import to_uint8
from tests.conftest import refused

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


def test_latents_become_a_picture_for_each_channel() -> None:
    latents = torch.arange(2 * 4 * 3 * 5).reshape(2, 4, 3, 5)
    pictures = as_pictures(latents)
    assert pictures.shape == (8, 1, 3, 5)
    assert torch.equal(pictures[5, 0], latents[1, 1])


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_unchanged(channels: int) -> None:
    images = noise(2, channels, 3, 5)
    assert as_pictures(images) is images


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_at_scale_1_every_pixel_is_exact(tmp_path: Path, channels: int, as_bytes: bool) -> None:
    images = noise(6, channels, 3, 5)
    given = images if as_bytes else images.float() / 127.5 - 1
    grid = saved(given, tmp_path / "grid.png", columns=2, scale=1)
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


def test_folders_are_made_and_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "grid.png"
    old, new = (saved(noise(4, 1, 8, 8) // divisor, path, scale=1) for divisor in (1, 2))
    assert not torch.equal(old, new)
    assert [file.name for file in path.parent.iterdir()] == ["grid.png"]


def test_names_stand_below_columns_or_below_each_image(tmp_path: Path) -> None:
    images = noise(5, 3, 20, 20)
    plain = saved(images, tmp_path / "plain.png", columns=3, scale=1)
    columns = saved(images, tmp_path / "c.png", columns=3, scale=1, names=["a", "a long name", "c", "a", "a long name"])
    each = saved(images, tmp_path / "each.png", columns=3, scale=1, names=["a", "b", "c", "d", "e"])
    assert torch.equal(columns[: len(plain)], plain)
    assert each.shape[0] - plain.shape[0] == 2 * (columns.shape[0] - plain.shape[0]) > 0
    below = columns[len(plain) :]
    for left in (PADDING, 2 * PADDING + 20, 3 * PADDING + 40):
        assert (below[:, left : left + 20] < 128).any()
        assert (below[:, left - PADDING : left] == 255).all()  # a long name stays in its column
    assert torch.equal(cell(each, 0, 1, 20, 20), images[1])


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    before = saved(noise(4, 1, 8, 8), path, scale=1)
    with pytest.raises(RuntimeError):
        save_grid(torch.zeros(4, 1, 8), path)
    with Image.open(path) as picture:
        assert torch.equal(torch.from_numpy(numpy.array(picture.convert("RGB"))), before)


def test_an_unwritable_path_is_refused_without_writing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "folder" / "x.png")
    check_writable(tmp_path / "file")
    for path in (tmp_path, tmp_path / "file" / "x.png", tmp_path / "file" / "new" / "x.png"):
        with refused(UserError, path, "directory"):
            check_writable(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
