"""Images as people look at them: uint8, and grids in a PNG."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor


def to_uint8(images: Tensor) -> Tensor:
    """Return images n c h w from [-1, 1] as uint8 on the CPU, rounded; what is outside the range is clipped."""
    return images.detach().float().add(1).mul(127.5).round().clamp(0, 255).to("cpu", torch.uint8)


def save_grid(images: Tensor, path: Path, columns: int | None = None, scale: int | None = None) -> None:
    """Write images n c h w, uint8 or floats in [-1, 1], as one PNG; the file appears whole or not at all.

    `columns` None is the squarest grid; `scale` None enlarges each pixel so that an image is about 64 pixels wide.
    """
    from PIL import Image
    from torchvision.utils import make_grid

    shown = images if images.dtype == torch.uint8 else to_uint8(images)
    scale = scale or max(1, 64 // shown.shape[-1])
    shown = shown.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    grid = make_grid(shown.float(), nrow=columns or math.ceil(math.sqrt(len(shown))), padding=4, pad_value=255)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    Image.fromarray(grid.permute(1, 2, 0).to(torch.uint8).numpy()).save(partial, "PNG")
    os.replace(partial, path)
