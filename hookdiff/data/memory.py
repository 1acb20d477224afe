"""Data sets in memory: images keep their stored dtype, and are scaled one batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MAX_LABEL = 2**24 - 1  # more classes would not fit in memory


def check_range(low: int, high: int) -> None:
    """Raise ValueError unless labels from `low` to `high` are allowed."""
    if low < -1 or high > MAX_LABEL:
        labels = str(low) if low == high else f"{low} to {high}"
        raise ValueError(f"expected labels from 0 to {MAX_LABEL} (-1: unknown), got {labels}")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor` to `device` without making the host wait for a GPU."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        # A copy from pageable memory makes the host wait; a copy from pinned memory is asynchronous.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_unit_range(images: Tensor) -> Tensor:
    """Scale uint8 images from [0, 255] to float32 in [-1, 1]; floats become float32, other integers stay the same."""
    if images.dtype == torch.uint8:
        return images.float().div_(127.5).sub_(1)
    return images.float() if images.is_floating_point() else images


class InMemory:
    """A data set in memory: images n c h w, uint8 or float in [-1, 1].

    Labels (n, int64; -1: unknown), the names of the classes, conditions (by name, n rows each; see `Source`) and texts
    (by name, for each image its captions in order; see `Images`) are optional.

    Raises:
        ValueError: for images, labels, conditions or texts of another shape, dtype or number.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        classes: Sequence[str] | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        texts: Mapping[str, Sequence[Sequence[str]]] | None = None,
    ) -> None:
        if images.dim() < 2 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise ValueError(f"expected images n c h w, uint8 or float, got {tuple(images.shape)} of {images.dtype}")
        if labels is not None and (labels.shape != images.shape[:1] or labels.dtype != torch.int64):
            raise ValueError(f"expected {len(images)} labels of int64, got {tuple(labels.shape)} of {labels.dtype}")
        for name, column in (conditions or {}).items():
            if not isinstance(column, Tensor) or column.shape[:1] != images.shape[:1]:
                got = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
                raise ValueError(f"conditions {name!r}: expected a tensor with {len(images)} rows, got {got}")
        for name, samples in (texts or {}).items():
            if len(samples) != len(images) or str in map(type, samples):
                raise ValueError(f"texts {name!r}: expected {len(images)} lists of captions, one for each image")
        self.images, self.labels, self.classes, self.conditions = images, labels, classes, dict(conditions or {})
        self.texts = texts

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> InMemory:
        """Return a copy on the GPU `device` if at most a quarter of its free memory is needed; else self."""
        size = self.images.nbytes + sum(column.nbytes for column in self.conditions.values())
        if device.type != "cuda" or size > torch.cuda.mem_get_info(device)[0] // 4:
            return self
        labels = None if self.labels is None else self.labels.to(device)
        conditions = {name: column.to(device) for name, column in self.conditions.items()}
        return InMemory(self.images.to(device), labels, self.classes, conditions, self.texts)

    def rows(
        self, indices: Tensor, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return the stored images, the labels and the conditions at `indices` (n, int64, CPU) on `device`."""
        rows, device = to_device(indices, self.images.device), device or self.images.device
        # Not [rows]: on a CPU, index_select copies whole rows and is up to 20 times as fast.
        labels = None if self.labels is None else to_device(self.labels.index_select(0, rows), device)
        conditions = {name: to_device(column.index_select(0, rows), device) for name, column in self.conditions.items()}
        return to_device(self.images.index_select(0, rows), device), labels, conditions
