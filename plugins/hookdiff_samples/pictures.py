"""Reads the pictures from which `hookdiff sample` starts, and writes the images that the command makes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
from attrs import define, field
from torch import Tensor

from hookdiff import UserError
from hookdiff.authors import by_class, save_animation, sheet
from hookdiff.cli import check_free
from hookdiff.data import Size, size_name, to_unit_range, trained_sizes
from hookdiff.disk import check_place, check_writable, new_file, reason, write_file, writing
from hookdiff.images import (
    Folder,
    Transforms,
    decode,
    left_out_text,
    open_picture,
    passed_over_text,
    refuse,
    unreadable_problems,
    upright_size,
    with_images,
)
from hookdiff.log import Panel, Picture, as_pictures, as_pillow, grid, padded

if TYPE_CHECKING:
    from hookdiff.experiment import Run

logger = logging.getLogger("hookdiff")

Read = TypeVar("Read")

_WHITE = 128  # smallest value of a white pixel of a mask


def picture_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files in `paths`, and the readable pictures in its folders by name.

    Raises UserError for a folder without a picture that can be read.
    """
    return [file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])]


def _in_folder(path: Path) -> list[Path]:
    try:
        folder = Folder(str(path), labels="none")
    except ValueError as error:
        raise UserError(f"--images {error}") from None
    errors = dict(with_images(folder, range(len(folder)), _load))
    unreadable = [str(error) for error in errors.values() if error is not None]
    refuse(unreadable_problems(unreadable, len(folder), skip=True))
    for text in (*left_out_text(unreadable, len(folder)), *passed_over_text(folder)):
        logger.warning("--images %s: %s", path, text)
    return [Path(folder.describe(index)) for index, error in errors.items() if error is None]


def _load(image: Any) -> None:
    decode(image, None, "black")


def read_pictures(files: Sequence[Path], run: Run, size: Size | None) -> list[Tensor]:
    """Return the pictures in `files` as images to start from, c h w in [-1, 1].

    They have the `size`; None: each has the nearest of the sizes on which `run` was trained. Transparent pixels are
    drawn in front of the background of the run's data.
    """
    channels, *sides = run.loop.feed.picture_shape
    if channels not in (1, 3):
        shown = " x ".join(map(str, (channels, *sides)))
        raise UserError(f"--images {files[0]}: needs a model of grey or RGB images; this model makes {shown}")
    transforms, sizes = run.transforms, list(trained_sizes(run.loop.feed))

    def fitted(file: Path) -> Tensor:
        width, height = _size(file)
        own = size or (sizes[0] if len(sizes) == 1 else transforms.sized.nearest(height, width))
        return to_unit_range(_fitted(file, channels, own, transforms.background))

    return [fitted(file) for file in files]


def read_mask(file: Path, pictures: Sequence[Path], size: Size) -> Tensor:
    """Return the mask in `file`, 1 1 h w, bool: True where it is white and not transparent.

    The mask is resized and cropped to the `size` like the `pictures`, so it must have the size of each picture.
    """
    width, height = _size(file)
    for picture in pictures:
        if (sides := _size(picture)) != (width, height):
            raise UserError(
                f"--mask {file}: {width} x {height}, but {picture} is {sides[0]} x {sides[1]}; a mask needs the size "
                "of each picture"
            )
    mask = _fitted(file, 1, size, "black")[None] >= _WHITE
    if not mask.any():
        raise UserError(f"--mask {file}: no pixel is white; paint the part white that is to change")
    return mask


def _fitted(path: Path, channels: int, size: Size, background: str) -> Tensor:
    options: Any = {"channels": 1 if channels == 1 else 3, "background": background}
    transforms = Transforms(image_size=max(size), upscale=True, **options)
    return _read(path, lambda image: transforms.fit(image, size))


def _size(path: Path) -> tuple[int, int]:
    return _read(path, upright_size)


def _read(path: Path, read: Callable[[Any], Read]) -> Read:
    try:
        with open_picture(str(path)) as picture:
            return read(picture)
    except Exception as error:  # decoders raise errors of any type
        raise UserError(f"{path}: cannot be read as a picture: {reason(error)}") from None


def free_name(folder: Path, stem: str, overwrite: bool) -> Path:
    """Return a file in `folder` that does not exist: STEM.png, STEM-2.png, ...; with `overwrite`, the first."""
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.png" for number in count(1))
    return next(path for path in map(folder.joinpath, names) if overwrite or not path.exists())


@define(eq=False)
class Output:
    """The files that a command writes: a grid or an archive, a picture of each image, or both."""

    out: Path | None
    each: Path | None
    num: int
    overwrite: bool
    between: int = 0  # images of a strip; 0: there are no strips
    texts: Sequence[str] = ()  # the prompt of each image, if there are prompts
    _pixels: dict[int, Tensor] = field(factory=dict, init=False)  # by number: uint8, c h w
    _singles: list[Path] = field(factory=list, init=False)  # files that were written
    _replaced: dict[int, list[Path]] = field(factory=dict, init=False)  # pictures of earlier calls, by number

    @property
    def is_archive(self) -> bool:
        return self.out is not None and self.out.suffix == ".npz"

    @property
    def animation(self) -> Path | None:
        """The animation of the strips."""
        return self.out.with_suffix(".gif") if self.out and self.between else None

    def check(self) -> None:
        """Raise UserError if a file cannot be written, or exists and may not be replaced."""
        suffixes = (".png",) if self.between else (".png", ".npz")
        if self.out and self.out.suffix not in suffixes:
            raise UserError(f"--out {self.out}: expected a name that ends in {' or '.join(suffixes)}")
        paths = [path for path in (self.out, self.animation) if path]
        for path in [*paths, *([self.each / single_name(0)] if self.each else [])]:
            check_writable(path)
        for number, path in self._existing():
            if number < self.num:
                self._replaced.setdefault(number, []).append(path)
        for path in [*paths, *chain.from_iterable(self._replaced.values())]:
            check_free(path, self.overwrite)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise UserError if samples of `shape` (c h w) are not pictures; a grid may have any number of channels."""
        sizes = " x ".join(map(str, shape))
        if len(shape) != 3:
            raise UserError(
                f"this model makes samples of {sizes}, which are no images; load_run(...).sample() returns them"
            )
        if (self.each or self.is_archive) and shape[0] not in (1, 3):
            raise UserError(f"--each and .npz files are for grey or RGB images; this model makes {sizes}")

    def check_sizes(self, sizes: Collection[Size]) -> None:
        """Raise UserError if the images of an archive have several `sizes`."""
        if self.is_archive and len(sizes) > 1:
            names = ", ".join(map(size_name, sizes))
            raise UserError(
                f"--out {self.out}: an NPZ file has images of one size, not of {names}; give --size or --each"
            )

    def _existing(self) -> Iterator[tuple[int, Path]]:
        """Yield the number and the path of each picture in the folder `each`, sorted by name."""
        for path in sorted(self.each.glob("[0-9]*.png")) if self.each else []:
            number = path.stem.partition("-")[0]
            if number.isdecimal() and len(number) >= len(single_name(0).partition(".")[0]):
                yield int(number), path

    def older(self) -> list[Path]:
        """Return the pictures of earlier calls that are still in the folder `each`."""
        written = set(self._singles)
        return [path for _, path in self._existing() if path not in written]

    def add(self, numbers: Sequence[int], pixels: Tensor, info: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        """Add images, uint8, n c h w, by their numbers; `info` has their settings, `names` all classes, if any."""
        if self.out:
            self._pixels |= dict(zip(numbers, pixels, strict=True))
        if self.each:
            for number, image in zip(numbers, pixels, strict=True):
                name = names[number] if names else ""
                path = self.each / single_name(number, name)
                more: dict[str, Any] = {"classes": [name]} if name else {}
                if self.texts:
                    more["prompts"] = [self.texts[number]]
                with writing(path):
                    for earlier in self._replaced.get(number, ()):  # a file for another class
                        if earlier != path:
                            check_place(earlier)
                            earlier.unlink(missing_ok=True)
                    Picture(numpy.asarray(as_pillow(image)), {**info, **more, "number": number}).save(path)
                    if self.texts:
                        text_file = path.with_suffix(".txt")
                        check_free(text_file, self.overwrite)
                        with new_file(text_file) as partial:
                            write_file(partial, f"{self.texts[number]}\n".encode())
                self._singles.append(path)

    def finish(
        self,
        labels: Sequence[int] | None,
        names: Sequence[str],
        columns: int | None,
        info: Mapping[str, Any],
        ends: Sequence[str] = (),
    ) -> list[Path]:
        """Write `out`, and its animation; return the files and the folder of single pictures.

        `labels` has the class number of each image, `names` the names of all classes, `ends` the names at the two ends
        of a strip; `info` goes into the PNG file of the grid.
        """
        if self.out:
            pixels = padded([self._pixels[number] for number in sorted(self._pixels)])
            if self.is_archive:
                with writing(self.out):
                    _write_archive(self.out, pixels, labels)
            else:
                if self.between:
                    panel = self._strips(pixels, labels, names, ends)
                else:
                    panel = self._grid(pixels, labels, names, columns)
                rows = list(ends) or [name for name in panel.row_names if name and not self.texts]
                with writing(self.out):
                    sheet([panel], info={**info, **({"classes": rows} if rows else {})}).save(self.out)
        if self.animation:
            with writing(self.animation):
                _animate(pixels, self.between, self.animation)
        return [path for path in (self.out, self.animation, self.each) if path]

    def _grid(self, pixels: Tensor, labels: Sequence[int] | None, names: Sequence[str], columns: int | None) -> Panel:
        if self.texts:
            different = list(dict.fromkeys(self.texts))
            numbers = [different.index(text) for text in self.texts]
            return by_class(pixels, numbers, different, columns)
        return by_class(pixels, labels, names, columns) if labels else Panel(pixels, columns)

    def _strips(self, pixels: Tensor, labels: Sequence[int] | None, names: Sequence[str], ends: Sequence[str]) -> Panel:
        """Return a panel with a strip in each row."""
        columns = [ends[0], *[""] * (self.between - 2), ends[1]] if ends else []
        rows = [class_name(label, names) for label in labels[:: self.between]] if labels and not ends else []
        rows = list(self.texts[:: self.between]) or rows
        return Panel(as_pictures(pixels), self.between, column_names=columns, row_names=rows)


def class_name(label: int, names: Sequence[str]) -> str:
    """Return the name of a class, "-" for none."""
    return names[label] if label >= 0 else "-"


def single_name(number: int, name: str = "") -> str:
    """Return the file name of one image: its number, and the letters of its class that every file system allows."""
    plain = re.sub(r"[^\w.]+", "_", name)[:60].strip("._")
    return f"{number:06d}{f'-{plain}' if plain else ''}.png"


def _animate(pixels: Tensor, between: int, path: Path) -> None:
    """Write an animation of all strips, n c h w, side by side, from one end to the other and back."""
    frames = [grid(pixels[k::between]).as_pillow() for k in range(between)]
    save_animation([*frames, *frames[-2:0:-1]], path, last=120)


def _write_archive(path: Path, pixels: Tensor, labels: Sequence[int] | None) -> None:
    """Write arr_0, n h w c, uint8; and arr_1, n, int64, if there are labels."""
    arrays: list[Any] = [pixels.permute(0, 2, 3, 1).contiguous().numpy()]
    if labels is not None:
        arrays.append(numpy.array(labels, dtype=numpy.int64))
    with new_file(path) as partial, partial.open("xb") as file:  # a name would get another suffix
        numpy.savez(file, *arrays)
