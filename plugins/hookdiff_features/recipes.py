"""Recipes: how packages turn images into the input of Inception. Distances of different recipes cannot be compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 299  # of the input of Inception


def as_rgb(images: Tensor) -> Tensor:
    """Return images, n 1 or 3 h w, as n 3 h w; a grey image has three equal channels."""
    return images.expand(-1, 3, -1, -1)


def pytorch_fid(images: Tensor) -> Tensor:
    """Resize and scale as pytorch-fid 0.3: bilinear without antialiasing, to [-1, 1]."""
    resized = functional.interpolate(images.float() / 255, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return 2 * resized - 1


def torch_fidelity(images: Tensor) -> Tensor:
    """Resize and scale as torch-fidelity 0.4 and the first code of FID: bilinear by TensorFlow 1, (x - 128) / 128."""
    down, right = (_tensorflow_1(side).to(images.device) for side in images.shape[2:])
    return (down @ images.float() @ right.T - 128) / 128


def torchmetrics(images: Tensor) -> Tensor:
    """Resize and scale as torchmetrics 1.8 and later: bilinear with antialiasing, (x - 128) / 128."""
    return (antialiased(images, SIDE, "bilinear") - 128) / 128


def clean_fid(images: Tensor) -> Tensor:
    """Resize and scale as Parmar et al. 2022 (arXiv 2104.11222): bicubic as Pillow, not rounded, (x - 128) / 128."""
    return (antialiased(images, SIDE, "bicubic").clamp(0, 255) - 128) / 128


RECIPES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch-fidelity": torch_fidelity,
    "pytorch-fid": pytorch_fid,
    "torchmetrics": torchmetrics,
    "clean-fid": clean_fid,
}


def antialiased(images: Tensor, side: int, mode: str) -> Tensor:
    """Return `images`, resized by torch with antialiasing to `side` x `side`; `mode`: "bilinear" or "bicubic"."""
    size = (side, side)
    return functional.interpolate(images.float(), size=size, mode=mode, align_corners=False, antialias=True)


def _tensorflow_1(side: int) -> Tensor:
    """Return the matrix (SIDE x side) that resizes as TensorFlow 1, by linear interpolation between pixels.

    TensorFlow 1 puts pixel k of the result at k * side / SIDE of the source, without an offset of half a pixel.
    """
    places = torch.arange(SIDE, dtype=torch.float32) * torch.tensor(side / SIDE, dtype=torch.float32)
    first = places.long()
    second = (first + 1).clamp(max=side - 1)
    share = places - first
    matrix = torch.zeros(SIDE, side)
    rows = torch.arange(SIDE)
    matrix[rows, first] += 1 - share
    matrix[rows, second] += share
    return matrix
