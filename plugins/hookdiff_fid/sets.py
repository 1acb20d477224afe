"""Sets of images that `hookdiff fid` compares: folders, archives, runs and their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from attrs import define
from torch import Tensor

from hookdiff import UserError, load_config, load_run
from hookdiff.data import Folder, Transforms
from hookdiff.data.arrays import names_in, open_array
from hookdiff.data.source import with_images
from hookdiff.disk import CONFIG, run_of, to_uint8
from hookdiff.errors import why_missing
from hookdiff.experiment import build_feed
from hookdiff.features import Collected, Gaussian, Space, paced
from hookdiff_fid.statistics import MU, has_statistics, read_statistics

_BATCH = 64  # images of one shape that are given together
_ARRAY = "arr_0"  # of the images in an archive, as the evaluators of the field name it

Parts = Callable[[], Iterator[Tensor]]  # returns the images in parts: n c h w, uint8


@define(frozen=True, eq=False)
class ImageSet:
    """Images that can be read again for each recipe, and their name for people."""

    name: str
    num: int
    parts: Parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first image, c h w."""
        return tuple(next(self.parts()).shape[1:])

    def features(self, space: Space) -> Collected:
        """Return the features of the images. Raises UserError for images that the space does not take."""
        try:
            return Collected.of(space, paced(self.parts(), self.num, f"{space.name}: {self.name}"))
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None


def open_set(path: Path, num: int, seed: int, device: str | None, trust: bool) -> ImageSet | Gaussian:
    """Return the images at `path`, or the statistics.

    * A run, or a checkpoint: `num` images are made of it, with the first average if it has one.
    * A folder: all pictures at any depth.
    * An .npz: its array arr_0 (uint8, n h w or n h w c), or the statistics mu and sigma.

    Raises UserError for anything else, and for pictures that cannot be read.
    """
    if path.suffix.lower() == ".npz":
        return read_statistics(path) if path.exists() and has_statistics(path) else _archive(path)
    if not path.is_dir():
        reason = "no folder, run or .npz" if path.exists() else why_missing(path)
        raise UserError(f"{path}: {reason}")
    return _made(path, num, seed, device, trust) if _is_run(path) else _folder(path)


def data_of(path: Path, trust: bool) -> ImageSet:
    """Return the training images of the run at `path`. Raises UserError if that is no run, or its data is not here."""
    if not _is_run(path):
        raise UserError(f"{path} is no run, so it has no training images: name the images to compare with")
    feed = build_feed(load_config(run_of(path) / CONFIG, trust=trust))

    def parts() -> Iterator[Tensor]:
        return (to_uint8(batch.inputs) for batch in feed.unaugmented(feed.training, _BATCH))

    return ImageSet(f"the training images of {path}", len(feed.training), parts)


def _is_run(path: Path) -> bool:
    return any((folder / CONFIG).is_file() for folder in (path, path.resolve().parent.parent))


def _made(path: Path, num: int, seed: int, device: str | None, trust: bool) -> ImageSet:
    with load_run(path, device=device, trust=trust) as run, run.weights() as weights:
        made = [to_uint8(part) for part in run.batches(num, seed=seed)]
        return ImageSet(f"{path} ({weights} weights of step {run.step})", num, lambda: iter(made))


def _archive(path: Path) -> ImageSet:
    try:
        pixels = numpy.asarray(open_array(path, _ARRAY, whole=True))
    except ValueError as error:
        known = "" if not path.exists() or _ARRAY in names_in(path) else f"; statistics are {MU} and sigma"
        raise UserError(f"{error}{known}") from None
    if pixels.dtype != numpy.uint8 or pixels.ndim not in (3, 4) or not len(pixels):
        shape = " x ".join(map(str, pixels.shape))
        raise UserError(f"{path}: {_ARRAY} has {shape} of {pixels.dtype}, expected n x h x w x c of uint8")
    images = torch.from_numpy(pixels).reshape(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
    return ImageSet(str(path), len(images), lambda: iter(torch.split(images, _BATCH)))


def _folder(path: Path) -> ImageSet:
    try:
        folder = Folder(str(path), labels="none")
    except ValueError as error:
        raise UserError(str(error)) from None
    transforms = Transforms()

    def parts() -> Iterator[Tensor]:
        waiting: list[Tensor] = []
        for _, pixels in with_images(folder, range(len(folder)), lambda _, image: transforms.fit(image)):
            if isinstance(pixels, Exception):
                raise pixels
            if waiting and (len(waiting) == _BATCH or pixels.shape != waiting[0].shape):
                yield torch.stack(waiting)
                waiting = []
            waiting.append(pixels)
        yield torch.stack(waiting)

    return ImageSet(str(path), len(folder), parts)
