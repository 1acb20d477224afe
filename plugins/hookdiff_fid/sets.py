"""Sets of images that `hookdiff fid` compares: folders, archives, runs and their data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy
import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff import SampleRequest, UserError, load_config, load_run, why_missing
from hookdiff.authors import InOrder, MeasuredImages
from hookdiff.cli import chosen_weights
from hookdiff.data import Size, labels_for, names_in, open_array, picture_shapes, size_name
from hookdiff.experiment import build_feed
from hookdiff.features import Collected, Gaussian, Space, data_features
from hookdiff.images import (
    Folder,
    Transforms,
    Unreadable,
    left_out_text,
    passed_over_text,
    refuse,
    unreadable_problems,
    upright_size,
    with_images,
)
from hookdiff.log import to_uint8
from hookdiff.run_dir import CHECKPOINTS, CONFIG, run_of
from hookdiff.terminal import paced
from hookdiff_fid.statistics import MU, has_statistics, read_statistics

_BATCH = 64  # images of one shape that go through the network together
_ARRAY = "arr_0"  # name of the images in an archive, as the usual evaluation programs expect

_RESIZED, _CROPPED = "resized", "cropped"

Labels = Callable[[Size | None], Tensor | None]  # returns the labels of the training samples of a size, if any

_WAITING = 4 * _BATCH  # most pictures that wait until a batch of their size is full


@define(frozen=True)
class Making:
    """How runs make their images; None: as configured in the run."""

    num: int
    seed: int
    device: str | None
    trust: bool
    settings: Sequence[str]  # changes of the run's config
    weights: str | None
    sampling: Mapping[str, Any]  # arguments of `Run.sampling`


@define(frozen=True, eq=False)
class ImageSet:
    """Images, with a name for messages; features in several spaces are computed in one pass."""

    name: str
    total: int
    shapes: Sequence[tuple[int, ...]]  # c h w: of all images of a run or its data, else of the first image
    _read: Callable[[Sequence[Space]], list[Collected]]
    unreadable: dict[int, str] = field(factory=dict)  # reasons by image; filled by `features`
    passed_over: Sequence[str] = ()  # texts about files that are not pictures
    made: Mapping[str, Any] = field(factory=dict)  # how a run makes the images; empty for other sets
    is_data: bool = False  # the training data of a run
    transforms: Transforms | None = None  # of a run: they give other pictures the sizes and channels of its samples
    changed: dict[int, Sequence[str]] = field(factory=dict)  # by image, the changes of its size
    is_of_one_size: bool = True  # whether all changed images have the size of the first one

    @property
    def num(self) -> int:
        return self.total - len(self.unreadable)

    @property
    def remarks(self) -> list[str]:
        """Texts about images that are left out, resized or cropped, and about files that are not pictures."""
        reasons = [self.unreadable[image] for image in sorted(self.unreadable)]
        counts = Counter(change for changes in self.changed.values() for change in changes)
        how = " and ".join(f"{counts[change]:,} {change}" for change in (_RESIZED, _CROPPED) if counts[change])
        target = size_name(self.shapes[0]) if self.is_of_one_size else "their nearest sizes"
        remark = f"of {self.total:,} images {how} to {target}, as the data of the run"
        return [*([remark] if how else []), *left_out_text(reasons, self.total), *self.passed_over]

    def check(self, space: Space) -> None:
        """Raise UserError unless `space` takes images of the `shapes`; no image is made."""
        try:
            for shape in self.shapes:
                space.check(shape)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def features(self, spaces: Sequence[Space]) -> list[Collected]:
        """Return the features of the images in each space. Raises UserError for images that a space does not take."""
        try:
            return self._read(spaces)
        except (UserError, ValueError) as error:
            raise UserError(f"{self.name}: {error}") from None


@define(frozen=True, eq=False)
class Statistics:
    """Statistics in place of images."""

    name: str
    gaussian: Gaussian

    @property
    def num(self) -> int | None:
        """The number of images; published files do not have it."""
        return self.gaussian.num


def open_sets(paths: Sequence[Path], making: Making) -> list[ImageSet | Statistics]:
    """Return the set at each of `paths`. If one of them is a run, other pictures get the size of its data.

    Raises UserError as `open_set` does.
    """
    opened: dict[Path, ImageSet | Statistics] = {}
    transforms = None
    for path in sorted(dict.fromkeys(paths), key=_is_run, reverse=True):
        images = opened[path] = open_set(path, making, transforms=transforms)
        transforms = transforms or (images.transforms if isinstance(images, ImageSet) else None)
    return [opened[path] for path in paths]


def open_set(
    path: Path, making: Making, labels: Labels | None = None, transforms: Transforms | None = None
) -> ImageSet | Statistics:
    """Return the images at `path`, or the statistics.

    * A run, or a checkpoint: the images are made when their features are computed, with the noise of the plugin `fid`.
      Each size is as frequent as in the training data. With the `labels` of a data set, each class is as frequent as
      in the data set. Default: the classes in turn.
    * A folder: all pictures at any depth that can be read.
    * An .npz: its array arr_0 (uint8, n h w or n h w c), or the statistics mu and sigma.

    The `transforms` of the compared run give the pictures of a folder or an archive the sizes of the run's samples.

    Raises UserError for any other path, and for pictures that cannot be read.
    """
    if path.suffix.lower() == ".npz":
        if path.exists() and has_statistics(path):
            return Statistics(str(path), read_statistics(path))
        return _archive(path, transforms)
    if not path.is_dir():
        reason = "no folder, run or .npz" if path.exists() else why_missing(path)
        raise UserError(f"{path}: {reason}")
    return _made(path, making, labels) if _is_run(path) else _folder(path, transforms)


def data_of(path: Path, settings: Sequence[str], trust: bool) -> tuple[ImageSet, Labels]:
    """Return the training images of the run at `path`, and the labels of its data.

    Raises UserError if `path` is not a run, or if its data is not on this machine.
    """
    if not path.exists():
        raise UserError(f"{path}: {why_missing(path)}")
    if not _is_run(path):
        raise UserError(f"{path} is not a run, so it has no training images; name the images B to compare with")
    feed = build_feed(load_config(run_of(path) / CONFIG, settings=settings, trust=trust), encode=False)
    name = f"the training data of {path}"

    def read(spaces: Sequence[Space]) -> list[Collected]:
        return [data_features(feed, feed.training, space, f"{space.name}: {name}") for space in spaces]

    return ImageSet(name, len(feed.training), feed.shapes, read, is_data=True), partial(labels_for, feed)


def _is_run(path: Path) -> bool:
    is_checkpoint = path.resolve().parent.name == CHECKPOINTS and (path.resolve().parent.parent / CONFIG).is_file()
    return (path / CONFIG).is_file() or is_checkpoint


def _made(path: Path, making: Making, known: Labels | None) -> ImageSet:
    num, seed, run = making.num, making.seed, load_run(path, making.settings, device=making.device, trust=making.trust)
    with chosen_weights(run, making.weights) as weights, run.sampling(**making.sampling):
        made = run.info(weights, seed)
        name, shapes = f"{path} ({run.origin(weights)}{_in_words(made)})", picture_shapes(run.loop.feed)

    def labels(request: SampleRequest, size: Size | None) -> tuple[int, ...]:
        return request.default_labels(len(run.classes), known(size) if known else None)

    def read(spaces: Sequence[Space]) -> list[Collected]:
        click.echo(f"making {num:,} images of {name}", err=True)
        features = [Collected() for _ in spaces]
        in_order = [InOrder(each) for each in features]
        with run, run.weights(making.weights) as weights, run.sampling(**making.sampling):
            images = MeasuredImages(run.loop, seed, run.in_loop(weights), labels if run.classes else None)
            parts = paced(images.parts(range(num)), num, f"images of {name}", size=lambda part: len(part[0]))
            with closing(parts):
                for numbers, part in parts:
                    for each, space in zip(in_order, spaces, strict=True):
                        each.add(numbers, *space(to_uint8(part)))
        return features

    return ImageSet(name, num, shapes, read, made=made, transforms=run.transforms)


def _in_words(info: Mapping[str, Any]) -> str:
    """Return the sampler of `info` as a part of the name of a set; "" for a sampler of another library."""
    if "sampler" not in info:
        return ""
    scale = info.get("guidance_scale", 1)
    return f", {info['sampler']}, {info['steps']} steps" + (f", guidance {scale:g}" if scale != 1 else "")


def _collected(spaces: Sequence[Space], parts: Iterable[Tensor]) -> list[Collected]:
    """Return the features in each space of the images in `parts`: n c h w each, uint8."""
    features = [Collected() for _ in spaces]
    for part in parts:
        for collected, space in zip(features, spaces, strict=True):
            collected.add(*space(part))
    return features


def _in_parts(name: str, num: int, parts: Callable[[], Iterator[Tensor]]) -> ImageSet:
    """Return the set of the images that each call of `parts` yields: n c h w each, uint8."""

    def read(spaces: Sequence[Space]) -> list[Collected]:
        with closing(paced(parts(), num, f"images of {name}")) as images:
            return _collected(spaces, images)

    return ImageSet(name, num, [tuple(next(parts()).shape[1:])], read)


def _order(num: int) -> Tensor:
    """Return numbers in a random order: sets are often sorted by class, and some metrics take the first images only."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(0))


def _archive(path: Path, transforms: Transforms | None) -> ImageSet:
    try:
        pixels = numpy.asarray(open_array(path, _ARRAY, whole=True))
    except ValueError as error:
        known = "" if not path.exists() or _ARRAY in names_in(path) else f"; statistics are {MU} and sigma"
        raise UserError(f"{error}{known}") from None
    if pixels.dtype != numpy.uint8 or pixels.ndim not in (3, 4) or not len(pixels):
        shape = " x ".join(map(str, pixels.shape))
        raise UserError(f"{path}: {_ARRAY} has {shape} of {pixels.dtype}, expected n x h x w x c of uint8")
    images = torch.from_numpy(pixels).reshape(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
    height, width = images.shape[2:]
    changed = dict.fromkeys(range(len(images)), _changes(transforms, (height, width))) if transforms else {}

    def parts() -> Iterator[Tensor]:
        for part in torch.split(_order(len(images)), _BATCH):
            if transforms:
                yield torch.stack([_fitted(transforms, image, (height, width)) for image in images[part]])
            else:
                yield images[part]

    try:
        return evolve(_in_parts(str(path), len(images), parts), changed=changed)  # all get one size
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _folder(path: Path, transforms: Transforms | None) -> ImageSet:
    try:
        folder = Folder(str(path), labels="none")
    except ValueError as error:
        raise UserError(str(error)) from None
    unreadable, changed = dict[int, str](), dict[int, Sequence[str]]()

    def parts() -> Iterator[Tensor]:
        waiting: dict[torch.Size, list[Tensor]] = {}  # pictures by their shape
        order = [index for index in _order(len(folder)).tolist() if index not in unreadable]
        for index, result in with_images(folder, order, partial(_pixels, transforms or Transforms())):
            if isinstance(result, Unreadable):
                unreadable[index] = str(result)
                continue
            pixels, changed[index] = torch.from_numpy(result[0]), result[1]
            same = waiting.setdefault(pixels.shape, [])
            same.append(pixels)
            if len(same) == _BATCH or sum(map(len, waiting.values())) == _WAITING:
                yield torch.stack(waiting.pop(max(waiting, key=lambda shape: len(waiting[shape]))))
        refuse(unreadable_problems([unreadable[index] for index in sorted(unreadable)], len(folder), skip=True))
        yield from map(torch.stack, waiting.values())

    known: dict[str, Any] = {"unreadable": unreadable, "changed": changed, "passed_over": passed_over_text(folder)}
    known["is_of_one_size"] = transforms is None or not transforms.has_sizes
    return evolve(_in_parts(str(path), len(folder), parts), **known)


def _pixels(transforms: Transforms, image: Any) -> tuple[Any, Sequence[str]]:
    """Return the pixels of a picture, c h w, uint8, and the changes of its size."""
    width, height = upright_size(image)  # before `fit`, which may shrink or rotate the picture
    return _fitted(transforms, image, (height, width)).numpy(), _changes(transforms, (height, width))


def _fitted(transforms: Transforms, image: Any, sides: Size) -> Tensor:
    """Return the pixels of a picture with these `sides` (height, width), in the size of the run's samples."""
    size = transforms.sized.nearest(*sides) if transforms.has_sizes else None
    return transforms.centre(transforms.fit(image, size))


def _changes(transforms: Transforms, sides: Size) -> Sequence[str]:
    """Return in words how `transforms` change the size of a picture with these `sides` (height, width)."""
    if transforms.side is None:
        return ()
    if transforms.has_sizes:
        size = transforms.sized.nearest(*sides)
        is_resized = max(size[0] / sides[0], size[1] / sides[1]) != 1
        return [*[_RESIZED] * is_resized, *[_CROPPED] * (sides[0] * size[1] != sides[1] * size[0])]
    is_cropped = len(set(sides)) > 1 or transforms.side != transforms.square
    return [*[_RESIZED] * (min(sides) != transforms.side), *[_CROPPED] * is_cropped]
