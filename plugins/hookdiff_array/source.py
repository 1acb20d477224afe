"""Images in one numpy file, .npy or .npz."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor

from hookdiff.errors import nearest, why_missing

Layout = Literal["n h w", "n h w c", "n c h w"]


class Arrays:
    """Images in one array: an .npy stays on disk and is read image by image, an .npz is read into memory.

    Raises ValueError for a file that cannot be read, an array that does not hold images, and labels that do not match.

    Args:
        path: an .npy or .npz file
        images: name of the array in an .npz; unless given, "images", or the only array
        labels: name of the array of labels in an .npz, or path of a separate .npy; one integer for each image (-1:
            unknown); unless given, "labels" if the .npz has it
        layout: "n h w", "n h w c" or "n c h w"; unless given, the only layout that the shape allows
        value_range: [low, high], the values of black and white; required unless the array is uint8
    """

    def __init__(
        self,
        path: str,
        images: str | None = None,
        labels: str | None = None,
        layout: Layout | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> None:
        self.path, self.range, self.classes = Path(path).expanduser(), value_range, None
        with _open(self.path) as stored:
            self.name = images or ("images" if len(stored) != 1 else next(iter(stored)))
            array = self.array
            self.labels = _labels(stored, labels, path, array.shape[:1])
        self.layout = layout or _layout(array.shape, path)
        if array.ndim != len(self.layout.split()):
            raise ValueError(f"{path}: its shape {array.shape} is not {self.layout!r}")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{path}: holds {array.dtype}, expected numbers")
        if value_range is None and array.dtype != numpy.uint8 and len(array):
            some = array[:1000]  # not the whole of a large file
            raise ValueError(
                f"{path}: holds {array.dtype}: set value_range = [LOW, HIGH], the values of black and white; the first "
                f"{len(some)} images hold {float(some.min())} to {float(some.max())}"
            )
        if value_range is not None and not value_range[0] < value_range[1]:
            raise ValueError(f"value_range must be a low and a high value, not {list(value_range)}")
        self.shape = tuple(self._channels_first(array[:1])[0].shape) if len(array) else None
        if self.shape and self.shape[0] > 4:
            raise ValueError(f"{path}: its images have {self.shape[0]} channels, expected 1 to 4")

    @cached_property
    def array(self) -> Any:
        """The images as they are stored; an .npy is memory-mapped."""
        with _open(self.path) as stored:
            return _pick(stored, self.name, self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "array"}  # each worker maps the file

    def __len__(self) -> int:
        return len(self.array)

    def load(self, index: int) -> Tensor:
        pixels = self._channels_first(self.array[index : index + 1])[0]
        if self.range is None:
            return torch.from_numpy(numpy.array(pixels))
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

    def _channels_first(self, images: Any) -> Any:
        if self.layout == "n h w":
            return images[:, None]
        return images.transpose(0, 3, 1, 2) if self.layout == "n h w c" else images


@contextmanager
def _open(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the arrays of an .npz by name, or the array of an .npy under an empty name."""
    if path.suffix.lower() not in (".npy", ".npz"):
        raise ValueError(f"{path}: expected an .npy or an .npz")
    try:
        stored = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path}: {why_missing(path)}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if isinstance(stored, NpzFile):
        with stored:
            yield stored
    else:
        yield {"": stored}


def _pick(stored: Mapping[str, Any], name: str, path: Path | str) -> Any:
    if name not in stored:
        names = ", ".join(stored) or "one array without a name"
        raise ValueError(f"{path}: has no array {name!r}{nearest(name, stored)}; it has {names}")
    return stored[name]


def _layout(shape: tuple[int, ...], path: str) -> Layout:
    if len(shape) == 3:
        return "n h w"
    if len(shape) == 4 and (shape[1] <= 4) != (shape[3] <= 4):
        return "n c h w" if shape[1] <= 4 else "n h w c"
    raise ValueError(f"{path}: the shape {shape} has no clear layout: set layout = 'n h w', 'n h w c' or 'n c h w'")


def _labels(stored: Mapping[str, Any], name: str | None, path: str, shape: tuple[int, ...]) -> Tensor | None:
    if name is None and "labels" not in stored:
        return None
    name = name or "labels"
    if name.endswith(".npy"):
        with _open(Path(name).expanduser()) as own:
            found = _pick(own, "", name)
    else:
        found = _pick(stored, name, path)
    if found.dtype.kind not in "iu" or found.shape != shape:
        got = f"{found.dtype} of shape {found.shape}"
        raise ValueError(f"{path}: labels = {name!r}: expected integers of shape {shape}, got {got}")
    if len(found) and int(found.min()) < -1:
        raise ValueError(f"{path}: labels = {name!r}: expected integers from 0 (-1: unknown), got {int(found.min())}")
    return torch.from_numpy(numpy.array(found).astype(numpy.int64))
