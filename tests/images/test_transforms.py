from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, functional as vision

from hookdiff.images.transforms import Transforms
from tests.conftest import refused
from tests.images.conftest import noise


def expected(image: Image.Image, side: int) -> torch.Tensor:
    """Return the image after torchvision's Resize and CenterCrop."""
    resized = vision.resize(image, [side], InterpolationMode.BICUBIC, antialias=True)
    return vision.pil_to_tensor(vision.center_crop(resized, [side, side]))


@given(width=st.integers(8, 70), height=st.integers(8, 70), side=st.integers(2, 8), mode=st.sampled_from(["L", "RGB"]))
def test_resizing_matches_torchvision(width: int, height: int, side: int, mode: str) -> None:
    image = noise(width * height, width, height, mode)
    found = Transforms(image_size=side).fit(image)
    assert (found.dtype, found.shape) == (torch.uint8, (len(mode), side, side))
    assert torch.equal(found, expected(image, side))


@given(width=st.integers(1, 20), height=st.integers(1, 20), side=st.integers(20, 33))
def test_enlarging_matches_torchvision(width: int, height: int, side: int) -> None:
    image = noise(width * height, width, height)
    assert torch.equal(Transforms(image_size=side, upscale=True).fit(image), expected(image, side))


@given(
    width=st.integers(6, 40),
    height=st.integers(6, 40),
    side=st.none() | st.integers(2, 50),
    before=st.sampled_from([1, 3]),
    after=st.sampled_from([None, 1, 3]),
)
def test_a_stack_is_fitted_like_single_images(width: int, height: int, side: Any, before: int, after: Any) -> None:
    stack = torch.randint(0, 256, (3, before, height, width), generator=torch.Generator().manual_seed(0))
    stack = stack.to(torch.uint8)
    transforms = Transforms(image_size=side, upscale=True, channels=after)
    each = torch.stack([transforms.fit(image) for image in stack])
    difference = (transforms.fit_stack(stack).float() - each.float()).abs()
    # Mixing channels and resizing both round. Pillow resizes, and clips, first in a direction that the shape decides.
    assert difference.max() <= (2 if width == height else 30)
    assert difference.mean() < 0.6


@pytest.mark.parametrize(("size", "fraction"), [((640, 480), 4), ((64, 64), 1), ((500, 130), 2)])
def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(
    tmp_path: Path, size: tuple[int, int], fraction: int
) -> None:
    rows, columns = numpy.mgrid[: size[1], : size[0]]
    picture = numpy.stack([columns * 255 / size[0], rows * 255 / size[1], (rows + columns) % 256], 2)
    Image.fromarray(picture.astype(numpy.uint8)).save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as lazy, Image.open(tmp_path / "a.jpg") as whole:
        found = Transforms(image_size=32).fit(lazy)
        assert lazy.size == (size[0] // fraction, size[1] // fraction)
        difference = (found.float() - expected(whole.convert("RGB"), 32).float()).abs()
    assert difference[:2].mean() < 1  # the first two channels are smooth


def test_grey_becomes_colour_and_colour_grey() -> None:
    colour = noise(0, 5, 4)
    red, green, blue = vision.pil_to_tensor(colour).double()
    grey = Transforms(channels=1).fit(colour)
    assert float((grey[0] - (0.299 * red + 0.587 * green + 0.114 * blue)).abs().max()) <= 0.51
    plain = noise(0, 5, 4, "L")
    assert torch.equal(Transforms(channels=3).fit(plain), Transforms().fit(plain).repeat(3, 1, 1))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_uint8_pixels_are_fitted_like_pictures(channels: int) -> None:
    stored = torch.randint(0, 256, (channels, 6, 9), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    found = Transforms(background="black").fit(stored)
    if channels in (1, 3):
        assert torch.equal(found, stored)
        assert torch.equal(Transforms(background="black").fit(stored.numpy()), stored)
        return
    alpha = stored[-1] / 255
    assert float((found.float() - stored[:-1] * alpha).abs().max()) <= 1


def test_pixels_without_channels_are_grey() -> None:
    assert torch.equal(Transforms().fit(torch.tensor([[1, 2]], dtype=torch.uint8)), torch.tensor([[[1, 2]]]))


def test_latents_that_fit_pass_unchanged() -> None:
    latents = torch.randn(7, 4, 4)
    assert Transforms().fit(latents) is latents
    assert Transforms(image_size=4).fit(latents) is latents
    with refused(ValueError, "7 x 4 x 4", "float32", "uint8", 1, 4):
        Transforms(image_size=2).fit(latents)


def test_pictures_that_are_too_small_are_refused_or_enlarged() -> None:
    with refused(ValueError, "7 x 12", "8 x 8", "upscale"):
        Transforms(image_size=8).fit(noise(0, 7, 12))
    with refused(ValueError, "9 x 9", "10 x 10"):
        Transforms(image_size=8, resize=10).fit(noise(0, 9, 9))
    assert Transforms(image_size=8, upscale=True).fit(noise(0, 7, 12)).shape == (3, 8, 8)


@pytest.mark.parametrize("options", [{"resize": 9}, {"image_size": 9, "resize": 8}])
def test_a_resize_needs_an_image_size_that_is_not_larger(options: dict[str, Any]) -> None:
    with refused(ValueError, "resize", "image_size", *options.values()):
        Transforms(**options)
