"""Images for people to look at: uint8 pixels, and grids in a PNG file."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from hookdiff.disk.files import new_file
from hookdiff.errors import UserError


def to_uint8(images: Tensor) -> Tensor:
    """Return images (n c h w in [-1, 1]) as rounded uint8 on the CPU; values outside the range are clipped."""
    return images.detach().float().add(1).mul(127.5).round().clamp(0, 255).to("cpu", torch.uint8)


def as_pictures(images: Tensor) -> Tensor:
    """Return images (n c h w) that can be shown: with 1 or 3 channels unchanged, otherwise a grey image per channel."""
    return images if images.shape[1] in (1, 3) else images.flatten(0, 1).unsqueeze(1)


def check_writable(path: Path) -> None:
    """Raise UserError if no file can be written at `path`; the check writes nothing."""
    parent = next((folder for folder in path.absolute().parents if folder.exists()), path)
    if path.is_dir() or not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"{path}: cannot be written; expected a file in a directory with write permission")


def save_grid(images: Tensor, path: Path, columns: int | None = None, scale: int | None = None) -> None:
    """Write images (n c h w, uint8 or floats in [-1, 1]) as a grid to one PNG file, which appears whole or not at all.

    `columns` None makes the grid as square as possible. `scale` enlarges both sides with smooth interpolation; None
    enlarges small images to a width of about 64 pixels.
    """
    from PIL import Image
    from torchvision.utils import make_grid

    shown = as_pictures(images if images.dtype == torch.uint8 else to_uint8(images)).float()
    scale = scale or max(1, 64 // shown.shape[-1])
    if scale > 1:
        shown = functional.interpolate(shown, scale_factor=scale, mode="bicubic").round().clamp(0, 255)
    grid = make_grid(shown, nrow=columns or math.ceil(math.sqrt(len(shown))), padding=4, pad_value=255)
    picture = grid[0] if shown.shape[1] == 1 else grid.permute(1, 2, 0)
    with new_file(path) as partial:
        Image.fromarray(picture.to(torch.uint8).numpy()).save(partial, "PNG")
