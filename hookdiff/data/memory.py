"""A data set that fits in memory, kept as it is stored and scaled one batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_unit_range(images: Tensor) -> Tensor:
    """Scale uint8 images from [0, 255] to float32 in [-1, 1]; floats are returned as float32, unscaled."""
    if images.dtype == torch.uint8:
        return images.float().div_(127.5).sub_(1)
    return images.float()


class InMemory:
    """A data set in memory: images n c h w, uint8 or float in [-1, 1].

    Labels (n, int64; -1: unknown) and the names of the classes are optional. Raises ValueError for images or labels of
    another shape or dtype.
    """

    def __init__(self, images: Tensor, labels: Tensor | None = None, classes: Sequence[str] | None = None) -> None:
        if images.dim() < 2 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise ValueError(f"expected images n c h w, uint8 or float, got {tuple(images.shape)} of {images.dtype}")
        if labels is not None and (labels.shape != images.shape[:1] or labels.dtype != torch.int64):
            raise ValueError(f"expected {len(images)} labels of int64, got {tuple(labels.shape)} of {labels.dtype}")
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> InMemory:
        """Return a copy on the GPU `device` if the set takes at most a quarter of its free memory; else self."""
        if device.type != "cuda" or self.images.nbytes > torch.cuda.mem_get_info(device)[0] // 4:
            return self
        labels = None if self.labels is None else self.labels.to(device)
        return InMemory(self.images.to(device), labels, self.classes)

    def rows(self, indices: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
        """Return images, as they are stored, and labels of `indices` (n, int64, CPU) on `device`."""
        rows = indices.to(self.images.device, non_blocking=True)
        images = self.images[rows].to(device, non_blocking=True)
        labels = None if self.labels is None else self.labels[rows].to(device, non_blocking=True)
        return images, labels
