"""Reads images from one numpy file: `source = "array"`."""

import math
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from hookdiff.data import check_range, names_in, open_array

Layout = Literal["n h w", "n h w c", "n c h w"]


class Arrays:
    """Images in one array: an .npy stays on disk and is read image by image.

    An .npz, or an .npy in Fortran order, is read into memory.

    Args:
        path: an .npy or .npz file
        images: name of the array in an .npz; default: "images", or the only array
        labels: name of the array of labels in an .npz, or path of a separate .npy; one integer for each image (-1:
            unknown); default: the array "labels" of the .npz, if there is one
        layout: "n h w", "n h w c" or "n c h w"; default: the only layout that the shape allows
        value_range: [low, high], the values of black and white; required unless the array is uint8

    Raises:
        ValueError: for a file that cannot be read, an array that does not hold images, and labels that do not match.
    """

    def __init__(
        self,
        path: str,
        images: str | None = None,
        labels: str | None = None,
        layout: Layout | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> None:
        self.path, self.range, self.classes = Path(os.path.expanduser(path)), value_range, None
        names = names_in(self.path)
        self.name = images or ("images" if len(names) != 1 else names[0])
        array = self.array
        self.labels = _labels(self.path, names, labels, array.shape[:1])
        self.layout = layout or _layout(array.shape, path)
        if len(array.shape) != len(self.layout.split()):
            raise ValueError(f"{path}: its shape {array.shape} is not {self.layout!r}: set another layout")
        if 0 in array.shape:
            raise ValueError(f"{path}: there are no pixels in its shape {array.shape}")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{path}: holds {array.dtype}, expected numbers")
        if value_range is None and array.dtype != numpy.uint8:
            some = range(min(len(array), 1000))  # not all of a large file
            low, high = min(float(array[k].min()) for k in some), max(float(array[k].max()) for k in some)
            raise ValueError(
                f"{path}: holds {array.dtype}: set value_range = [LOW, HIGH], the values of black and white; the first "
                f"{len(some):,} images hold {low} to {high}"
            )
        if value_range is not None and not 1e-300 < value_range[1] - value_range[0] < math.inf:  # false for NaN
            raise ValueError(f"value_range must be a low and a high value, both finite, not {list(value_range)}")
        self.shape = tuple(self._channels_first(array[0]).shape)
        if self.shape[0] > 4:
            raise ValueError(f"{path}: its images have {self.shape[0]} channels, expected 1 to 4")

    @cached_property
    def array(self) -> Any:
        return open_array(self.path, self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "array"}  # each worker opens the file

    def __len__(self) -> int:
        return len(self.array)

    def load(self, index: int) -> Tensor:
        pixels = self._channels_first(self.array[index])
        if self.range is None:
            return torch.from_numpy(numpy.ascontiguousarray(pixels))
        low, high = self.range
        values = pixels.astype(numpy.float64)
        if not (values.min() >= low and values.max() <= high):  # written so that NaN is refused too
            raise ValueError(f"values from {values.min():g} to {values.max():g}, value_range is [{low:g}, {high:g}]")
        return torch.from_numpy(numpy.rint((values - low) * (255 / (high - low))).astype(numpy.uint8))

    def describe(self, index: int) -> str:
        return f"{self.path}[{index}]"

    def fingerprint(self) -> str:
        status = os.stat(self.path)
        return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns} {self.name} {self.layout} {self.range}"

    def _channels_first(self, image: Any) -> Any:
        if self.layout == "n h w":
            return image[None]
        return image.transpose(2, 0, 1) if self.layout == "n h w c" else image


def _layout(shape: tuple[int, ...], path: str) -> Layout:
    if len(shape) == 3:
        return "n h w"
    if len(shape) == 4 and (shape[1] <= 4) != (shape[3] <= 4):
        return "n c h w" if shape[1] <= 4 else "n h w c"
    raise ValueError(f"{path}: the shape {shape} has no clear layout: set layout = 'n h w', 'n h w c' or 'n c h w'")


def _labels(path: Path, names: list[str], name: str | None, shape: tuple[int, ...]) -> Tensor | None:
    if name is None and "labels" not in names:
        return None
    name = name or "labels"
    file = Path(os.path.expanduser(name)) if name.endswith(".npy") else None
    labels = open_array(file or path, "" if file else name, whole=True)
    where = f"{file or path}: labels = {name!r}"
    if labels.dtype.kind not in "iu" or labels.shape != shape:
        raise ValueError(f"{where}: expected integers of shape {shape}, got {labels.dtype} of shape {labels.shape}")
    if len(labels):
        try:
            check_range(int(labels.min()), int(labels.max()))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return torch.from_numpy(labels.astype(numpy.int64))
