"""Images in one numpy file, .npy or .npz."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from hookdiff.errors import nearest

Layout = Literal["n h w", "n h w c", "n c h w"]


class Arrays:
    """Images of one array, read as they are needed: an .npy stays on disk.

    path: an .npy, or an .npz, in which `images` names the array: "images", or the only one, unless given.
    labels: the name of an array in the .npz ("labels" if there is one), or an .npy of its own; whole numbers, n.
    layout: told from the shape unless given. value_range: what becomes 0 and 255, linearly; uint8 needs none.

    Raises ValueError for what is no array of images, and for labels of another number.
    """

    def __init__(
        self,
        path: str,
        images: str | None = None,
        labels: str | None = None,
        layout: Layout | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.name = _pick(self.path, images, "images")
        found, self.layout = self.array, layout or _guess(self.path, self.array.shape)
        if found.ndim != len(self.layout.split()):
            raise ValueError(f"{self.path}: its shape {found.shape} is no {self.layout!r}")
        if found.dtype.kind not in "biuf":
            raise ValueError(f"{self.path}: holds {found.dtype}, expected numbers")
        if value_range is None and found.dtype != numpy.uint8:
            least, most = (float(each) for each in (found[:64].min(), found[:64].max())) if len(found) else (0.0, 1.0)
            raise ValueError(
                f"{self.path}: holds {found.dtype}: value_range = [LOW, HIGH] must say what is black and white "
                f"(the first {min(64, len(found))} are from {least:g} to {most:g})"
            )
        if value_range is not None and not value_range[0] < value_range[1]:
            raise ValueError(f"value_range must be a low and a high value, not {list(value_range)}")
        self.range = value_range
        self.shape = tuple(self._channels_first(found[:1])[0].shape) if len(found) else None
        self.classes = None
        self.labels = _labels(self.path, labels, len(found))

    @cached_property
    def array(self) -> Any:
        """The images as they are stored, mapped into memory from an .npy."""
        return _open(self.path)[self.name] if self.name else _open(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "array"}  # a worker opens its own

    def __len__(self) -> int:
        return len(self.array)

    def load(self, index: int) -> Tensor:
        """Return uint8 pixels, c h w."""
        pixels = self._channels_first(self.array[index : index + 1])[0]
        if self.range is None:
            return torch.from_numpy(numpy.array(pixels))
        low, high = self.range
        values = pixels.astype(numpy.float64)
        if not (values.min() >= low and values.max() <= high):  # written so that NaN is refused too
            raise ValueError(f"values from {values.min():g} to {values.max():g}, value_range is [{low:g}, {high:g}]")
        return torch.from_numpy(numpy.rint((values - low) * (255 / (high - low))).astype(numpy.uint8))

    def describe(self, index: int) -> str:
        """Return the file and the position in it."""
        return f"{self.path}[{index}]"

    def fingerprint(self) -> str:
        """Return the file's name, size and time of change, and how it is read."""
        about = os.stat(self.path)
        return f"{self.path.resolve()} {about.st_size} {about.st_mtime_ns} {self.name} {self.layout} {self.range}"

    def _channels_first(self, images: Any) -> Any:
        if self.layout == "n h w":
            return images[:, None]
        return images.transpose(0, 3, 1, 2) if self.layout == "n h w c" else images


def _open(path: Path) -> Any:
    if path.suffix.lower() not in (".npy", ".npz"):
        raise ValueError(f"{path}: expected an .npy or an .npz")
    try:
        return numpy.load(path, mmap_mode="r" if path.suffix.lower() == ".npy" else None, allow_pickle=False)
    except FileNotFoundError:
        parent = path.parent
        near = nearest(path.name, [p.name for p in parent.iterdir()]) if parent.is_dir() else ""
        raise ValueError(f"{path}: no such file{near}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _pick(path: Path, name: str | None, usual: str, needed: bool = True) -> str | None:
    """Return the name of the array in an .npz; None in an .npy, which has no names."""
    opened = _open(path)
    if not isinstance(opened, Mapping):
        if name is not None:
            raise ValueError(f"{path}: an .npy has no array named {name!r}")
        return None
    names: list[str] = list(opened)
    if name is None:
        if usual in names or not needed:
            return usual if usual in names else None
        if len(names) == 1:
            return names[0]
        raise ValueError(f"{path}: say which array has the {usual}: {usual} = one of {', '.join(names) or 'none'}")
    if name not in names:
        raise ValueError(f"{path}: has no array {name!r}{nearest(name, names)}; it has {', '.join(names)}")
    return name


def _guess(path: Path, shape: tuple[int, ...]) -> Layout:
    if len(shape) == 3:
        return "n h w"
    if len(shape) == 4:
        first, last = shape[1] <= 4, shape[3] <= 4
        if first != last:
            return "n c h w" if first else "n h w c"
    raise ValueError(f"{path}: cannot tell the layout of {shape}: say layout = 'n h w', 'n h w c' or 'n c h w'")


def _labels(path: Path, labels: str | None, length: int) -> Tensor | None:
    if labels is not None and labels.endswith(".npy"):
        where, found = labels, _open(Path(labels).expanduser())
    else:
        name = _pick(path, labels, "labels", needed=False)
        if name is None:
            return None
        where, found = f"{path}[{name!r}]", _open(path)[name]
    if found.dtype.kind not in "iu" or found.shape != (length,):
        raise ValueError(f"{where}: expected {length} whole numbers as labels, got {found.shape} of {found.dtype}")
    if length and int(found.min()) < -1:
        raise ValueError(f"{where}: labels are counted from 0 (-1: unknown), got {int(found.min())}")
    return torch.from_numpy(numpy.array(found).astype(numpy.int64))
