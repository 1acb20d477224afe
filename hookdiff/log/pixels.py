"""Pixels of images: uint8, with one or three channels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookdiff.disk.files import new_file

if TYPE_CHECKING:
    from PIL.Image import Image


def to_uint8(images: Tensor) -> Tensor:
    """Return images (n c h w) as rounded uint8 on the CPU; values are clipped to [-1, 1], and NaN is black."""
    shifted = images.detach().float().add(1).mul(127.5).round()
    return shifted.nan_to_num(nan=0.0).clamp(0, 255).to("cpu", torch.uint8)


def as_pictures(images: Tensor) -> Tensor:
    """Return images (n c h w) that can be shown: with 1 or 3 channels unchanged, otherwise a grey image per channel."""
    return images if images.shape[1] in (1, 3) else images.flatten(0, 1).unsqueeze(1)


def padded(images: Sequence[Tensor]) -> Tensor:
    """Return images (c h w each, uint8) of one or several sizes as one tensor, n c h w.

    Each image is centred on white in the height and the width of the largest ones.
    """
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    stack = torch.full((len(images), images[0].shape[0], height, width), 255, dtype=torch.uint8)
    for row, image in zip(stack, images, strict=True):
        top, left = (height - image.shape[1]) // 2, (width - image.shape[2]) // 2
        row[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return stack


def as_pillow(image: Tensor) -> Image:
    """Return one image (c h w, uint8, c 1 or 3) as an image of Pillow."""
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).contiguous().numpy())


def save_image(image: Tensor, path: str | Path) -> None:
    """Write one image (c h w, uint8, c 1 or 3) to a PNG file, which appears whole or not at all."""
    with new_file(Path(path)) as partial:
        as_pillow(image).save(partial, "PNG")
