"""Pictures that `hookdiff sample` starts from, and those that it writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import torch
from attrs import define, field
from torch import Tensor

from hookdiff import UserError
from hookdiff.authors import by_class, sheet
from hookdiff.data import to_unit_range
from hookdiff.disk import check_writable, new_file, writing
from hookdiff.images import (
    Folder,
    Transforms,
    decode,
    left_out_text,
    open_picture,
    passed_over_text,
    reason,
    refuse,
    unreadable_problems,
    with_images,
)
from hookdiff.log import Panel, save_image

logger = logging.getLogger("hookdiff")

_WHITE = 128  # the least value of a pixel that is painted


def picture_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files in `paths`, and the pictures in its folders by name, without those that cannot be read.

    Raises UserError for a folder without a picture that can be read.
    """
    return [file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])]


def _in_folder(path: Path) -> list[Path]:
    try:
        folder = Folder(str(path), labels="none")
    except ValueError as error:
        raise UserError(f"--images {error}") from None
    found = dict(with_images(folder, range(len(folder)), _load))
    unreadable = [str(error) for error in found.values() if error is not None]
    refuse(unreadable_problems(unreadable, len(folder), skip=True))
    for text in (*left_out_text(unreadable, len(folder)), *passed_over_text(folder)):
        logger.warning("--images %s: %s", path, text)
    return [Path(folder.describe(index)) for index, error in found.items() if error is None]


def _load(image: Any) -> None:
    decode(image, None, "black")


def read_pictures(files: Sequence[Path], shape: Sequence[int]) -> Tensor:
    """Return the pictures in `files` as inputs of a model of images of `shape` (c h w): n c h w in [-1, 1]."""
    channels, *sides = shape
    if channels not in (1, 3) or len(set(sides)) != 1:
        made = " x ".join(map(str, shape))
        raise UserError(f"--images {files[0]}: needs a model of square grey or RGB images; this one makes {made}")
    return torch.stack([to_unit_range(_fitted(file, channels, sides[0])) for file in files])


def read_mask(file: Path, shape: Sequence[int]) -> Tensor:
    """Return the mask in `file`, 1 1 h w, bool: True where its picture is white."""
    mask = _fitted(file, 1, shape[-1])[None] >= _WHITE
    if not mask.any():
        raise UserError(f"--mask {file}: nothing of it is white, so there is nothing to paint")
    return mask


def _fitted(path: Path, channels: int, side: int) -> Tensor:
    transforms = Transforms(image_size=side, channels=1 if channels == 1 else 3, upscale=True)
    try:
        with open_picture(str(path)) as picture:
            return transforms.fit(picture)
    except Exception as error:  # decoders raise errors of any type
        raise UserError(f"{path}: cannot be read as a picture: {reason(error)}") from None


def free_name(folder: Path, seed: int, overwrite: bool) -> Path:
    """Return a file in `folder` that does not exist: seed-0.png, seed-0-2.png, ...; with `overwrite`, the first."""
    names = (f"seed-{seed}{'' if number == 1 else f'-{number}'}.png" for number in count(1))
    return next(path for path in map(folder.joinpath, names) if overwrite or not path.exists())


@define(eq=False)
class Output:
    """The files that a command writes: a grid or an archive, a picture of each image, or both."""

    out: Path | None
    each: Path | None
    num: int
    overwrite: bool
    _pixels: list[Tensor] = field(factory=list, init=False)  # uint8, n c h w
    _singles: list[Path] = field(init=False)
    _written: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._singles = [self.each / f"{number:06d}.png" for number in range(self.num)] if self.each else []

    @property
    def is_archive(self) -> bool:
        return self.out is not None and self.out.suffix == ".npz"

    def check(self) -> None:
        """Raise UserError if a file cannot be written, or exists and may not be replaced."""
        if self.out and self.out.suffix not in (".png", ".npz"):
            raise UserError(f"--out {self.out}: expected a name that ends in .png or .npz")
        for path in [*([self.out] if self.out else []), *self._singles[:1]]:
            check_writable(path)
        for path in [*([self.out] if self.out else []), *self._singles]:
            if path.exists() and not self.overwrite:
                raise UserError(f"{path} exists; choose another name, or --overwrite to replace it")

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise UserError if images of `shape` (c h w) are no pictures; a grid may have any number of channels."""
        made = " x ".join(map(str, shape))
        if len(shape) != 3:
            raise UserError(
                f"this model makes samples of {made}, which are no images; load_run(...).sample() returns them"
            )
        if (self.each or self.is_archive) and shape[0] not in (1, 3):
            raise UserError(f"--each and .npz files are for grey or RGB images; this model makes {made}")

    def num_older(self) -> int:
        """Return how many pictures of an earlier call follow those of this one in the folder `each`."""
        if self.each is None:
            return 0
        numbers = (int(path.stem) for path in self.each.glob("[0-9]*.png") if path.stem.isdecimal())
        return sum(number >= self.num for number in numbers)

    def add(self, pixels: Tensor) -> None:
        """Take the next images: uint8, n c h w."""
        if self.out:
            self._pixels.append(pixels)
        if self.each:
            for image, path in zip(pixels, self._singles[self._written :], strict=False):
                with writing(path):
                    save_image(image, path)
            self._written += len(pixels)

    def finish(
        self, labels: Sequence[int] | None, names: Sequence[str], columns: int | None, info: Mapping[str, Any]
    ) -> list[Path]:
        """Write `out`; return it and the folder of single pictures.

        `labels` are those of all images, `names` those of the classes; `info` goes into the PNG file of the grid.
        """
        if self.out:
            pixels = torch.cat(self._pixels)
            with writing(self.out):
                if self.is_archive:
                    _write_archive(self.out, pixels, labels)
                else:
                    panel = by_class(pixels, labels, names, columns) if labels else Panel(pixels, columns)
                    classes = {"classes": [name for name in panel.row_names if name]} if labels else {}
                    sheet([panel], info={**info, **classes}).save(self.out)
        return [path for path in (self.out, self.each) if path]


def _write_archive(path: Path, pixels: Tensor, labels: Sequence[int] | None) -> None:
    """Write arr_0, n h w c, uint8; and arr_1, n, int64, if there are labels."""
    arrays: list[Any] = [pixels.permute(0, 2, 3, 1).contiguous().numpy()]
    if labels is not None:
        arrays.append(numpy.array(labels, dtype=numpy.int64))
    with new_file(path) as partial, partial.open("wb") as file:  # a name would get another suffix
        numpy.savez(file, *arrays)
