"""A data set that fits in memory, held as it is stored and scaled a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_unit_range(images: Tensor) -> Tensor:
    """Scale uint8 images from [0, 255] to float32 in [-1, 1]; floats pass as float32."""
    if images.dtype == torch.uint8:
        return images.float().div_(127.5).sub_(1)
    return images.float()


class InMemory:
    """Images n c h w, uint8 or float in [-1, 1], with labels (n, int64; -1: unknown) and their names, or without.

    Raises ValueError for images or labels of another shape or dtype.
    """

    def __init__(self, images: Tensor, labels: Tensor | None = None, classes: Sequence[str] | None = None) -> None:
        if images.dim() < 2 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise ValueError(f"expected images n c h w, uint8 or float, got {tuple(images.shape)} of {images.dtype}")
        if labels is not None and (labels.shape != images.shape[:1] or labels.dtype != torch.int64):
            raise ValueError(f"expected {len(images)} labels of int64, got {tuple(labels.shape)} of {labels.dtype}")
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int | None:
        """The number of labels, counted from 0; None without labels."""
        return count_classes(self.labels, self.classes)

    def to(self, device: torch.device) -> InMemory:
        """Return the set on `device` where it takes at most a quarter of the free memory, else as it is."""
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

    def fetch(self, indices: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
        """Return inputs (float32 in [-1, 1]) and labels of `indices` (n, int64, CPU) on `device`."""
        images, labels = self.rows(indices, device)
        return to_unit_range(images), labels


def count_classes(labels: Tensor | None, classes: Sequence[str] | None) -> int | None:
    """Return the number of classes: by their names, or by the highest label; None without labels."""
    if labels is None:
        return None
    return len(classes) if classes is not None else int(labels.max()) + 1 if len(labels) else 0
