import colorsys
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torchvision.transforms import functional as vision

from hookdiff import Batch
from hookdiff.images import Transforms, augment as stage
from hookdiff.images.augment import jitter

ALL = Transforms(image_size=9, resize=12, flip=0.3, color_jitter=(0.4, 0.3, 0.5, 0.2))


def augment(images: Tensor, transforms: Transforms, seed: int, epoch: int, indices: Tensor) -> Tensor:
    return stage.augment(Batch(images, indices=indices), transforms, seed, epoch).inputs


def center_crop(images: Tensor, transforms: Transforms) -> Tensor:
    return stage.center_crop(Batch(images), transforms).inputs


def stack(num: int = 40, side: int = 12, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, channels, side, side), generator=generator).to(torch.uint8)


@given(rows=st.lists(st.integers(0, 39), min_size=1, max_size=40), channels=st.sampled_from([1, 3]))
def test_a_sample_is_augmented_alike_in_any_batch(rows: list[int], channels: int) -> None:
    images, indices = stack(channels=channels), torch.arange(40) * 7
    whole = augment(images, ALL, 3, 5, indices)
    assert torch.equal(augment(images[rows], ALL, 3, 5, indices[rows]), whole[rows])
    assert whole.shape == (40, channels, 9, 9)
    assert -1 <= whole.min() < whole.max() <= 1


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 6}])
def test_another_seed_or_epoch_changes_every_image(change: dict[str, int]) -> None:
    images, indices = stack(), torch.arange(40)
    before = augment(images, ALL, indices=indices, seed=3, epoch=5)
    after = augment(images, ALL, indices=indices, **{"seed": 3, "epoch": 5, **change})
    assert (before != after).flatten(1).any(1).all()


def test_without_transforms_only_the_range_changes() -> None:
    images = stack()
    assert torch.equal(augment(images, Transforms(), 0, 0, torch.arange(40)), images.float() / 127.5 - 1)
    latents = torch.randn(4, 7, 3, 3) * 5
    assert torch.equal(augment(latents, Transforms(), 0, 0, torch.arange(4)), latents)


@pytest.mark.parametrize(("flip", "share"), [(True, 0.5), (0.2, 0.2), (1.0, 1.0)])
def test_flip_gives_the_share_of_mirrored_images(flip: Any, share: float) -> None:
    images = stack(1).expand(4000, -1, -1, -1)
    found = augment(images, Transforms(flip=flip), 0, 0, torch.arange(4000))
    same = (found == images.float() / 127.5 - 1).flatten(1).all(1)
    mirrored = (found == images.flip(-1).float() / 127.5 - 1).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert float(mirrored.double().mean()) == pytest.approx(share, abs=0.025)


def test_every_crop_is_equally_likely() -> None:
    image = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6).expand(9000, -1, -1, -1)
    found = augment(image, Transforms(image_size=4, resize=6), 0, 0, torch.arange(9000))
    values = found.add(1).mul(127.5).round().int()
    corners = values[:, 0, 0, 0]
    assert sorted(corners.unique().tolist()) == [6 * top + left for top in range(3) for left in range(3)]
    assert torch.equal(values[:, 0], corners.view(-1, 1, 1) + image[0, 0, :4, :4].int())
    assert corners.unique(return_counts=True)[1].tolist() == pytest.approx([1000] * 9, abs=120)


def test_flipping_does_not_move_the_crop() -> None:
    images, indices = stack(), torch.arange(40)
    cut = augment(images, Transforms(image_size=4, resize=12), 0, 0, indices)
    assert torch.equal(cut, augment(images, Transforms(image_size=4, resize=12, flip=1.0), 0, 0, indices).flip(-1))


def test_without_augmentation_the_centre_is_cut_out() -> None:
    images = stack()
    assert torch.equal(center_crop(images, ALL), images[:, :, 2:11, 2:11].float() / 127.5 - 1)
    assert torch.equal(center_crop(images, Transforms(flip=1.0)), images.float() / 127.5 - 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("draw", [0.0, 0.3, 0.9])
def test_colours_change_as_in_torchvision(which: int, draw: float, channels: int) -> None:
    strengths: Any = [0.0] * 4
    strengths[which] = 0.5 if which == 3 else 0.6
    images = stack(5, 8, channels).float() / 255
    draws = torch.full((5, 4), draw, dtype=torch.float64)
    found = jitter(images.clone(), tuple(strengths), draws, torch.rand(5, 4, dtype=torch.float64))
    factor = (0.4 + 1.2 * draw) if which < 3 else draw - 0.5
    names = ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue")
    torch.testing.assert_close(found, getattr(vision, names[which])(images, factor), rtol=0, atol=1e-5)


def test_colour_changes_are_applied_in_the_drawn_order() -> None:
    images = stack(2, 8).float() / 255
    order = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    draws = torch.full((2, 4), 0.8, dtype=torch.float64)
    found = jitter(images.clone(), (0.5, 0.5, 0.5, 0.1), draws, order)
    names = ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue"]
    factors = dict(zip(names, [1.3, 1.3, 1.3, 0.06], strict=True))
    for image, result, sequence in zip(images, found, (names, names[::-1]), strict=True):
        for name in sequence:
            image = getattr(vision, name)(image, factors[name])
        torch.testing.assert_close(result, image, rtol=0, atol=1e-5)
    assert not torch.allclose(found[0], found[1])


@given(colour=st.tuples(*[st.integers(0, 255)] * 3), shift=st.floats(-0.5, 0.5))
def test_the_hue_turns_as_in_the_hsv_cone(colour: tuple[int, int, int], shift: float) -> None:
    image = torch.tensor(colour).view(1, 3, 1, 1).float() / 255
    draws = torch.full((1, 4), shift + 0.5, dtype=torch.float64)
    found = jitter(image.clone(), (0.0, 0.0, 0.0, 0.5), draws, torch.zeros(1, 4, dtype=torch.float64))
    hue, saturation, value = colorsys.rgb_to_hsv(*(each / 255 for each in colour))
    expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
    assert found.flatten().tolist() == pytest.approx(expected, abs=2e-5)
