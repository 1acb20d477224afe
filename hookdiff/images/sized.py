"""Pictures in several sizes: the size of each picture, and a table of decoded pixels for each size."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve
from torch import Tensor

from hookdiff.data.source import AnySource
from hookdiff.data.table import FORMAT, Column, load_if_sound, load_or_make, read_table, save_table
from hookdiff.errors import UserError
from hookdiff.images.buckets import cut_off
from hookdiff.images.cache import facts_of, place_of, survey_of
from hookdiff.images.items import ItemKeys, picture_in, sides_of
from hookdiff.images.labels import as_lines
from hookdiff.images.shape_of import ShapeOf
from hookdiff.images.sizes import sizes_of
from hookdiff.images.survey import Survey, misfits, refuse, survey, unreadable_problems
from hookdiff.images.transforms import Transforms

logger = logging.getLogger("hookdiff")

_SIZES = "sizes"


@define(eq=False)
class Sized:
    """The sizes of the samples of a source, and the size that each picture gets."""

    shapes: list[tuple[int, int, int]]  # c h w, of the sizes that pictures get, ascending
    numbers: Tensor  # of the shape of each picture: n, int64
    originals: Tensor  # height and width of the pictures: n 2, int64; 0: unreadable
    enlarged: Tensor  # n, bool

    def rows(self, number: int, without: Collection[int] = ()) -> Tensor:
        """Return the pictures of a shape (n, int64), without those that cannot be read."""
        own = self.numbers == number
        own[list(without)] = False
        return own.nonzero().squeeze(1)

    @property
    def cut_off(self) -> Tensor:
        """The share of the pixels of each picture that is cut off: n; 0 for an unreadable picture."""
        targets = torch.tensor(self.shapes)[self.numbers, 1:]
        known = self.originals[:, 0] > 0
        share = cut_off(self.originals.clamp(min=1), targets)
        return share.where(known, 0.0)

    def in_workers(self, items: bool) -> ShapeOf:
        """Return the shapes in a form for workers, which get a pickle; with the sizes of `items`, which may change."""
        originals = self.originals.int().numpy() if items else None
        return ShapeOf(tuple(self.shapes), self.numbers.short().numpy(), originals)


def look(
    source: AnySource, transforms: Transforms, keys: ItemKeys, skip: bool, folder: Path, keep: bool
) -> tuple[Survey, Sized]:
    """Return the survey of `source` and the size of each picture.

    If the source has a fingerprint, the sizes are read from a table in `folder`, which is made if they are to be kept.
    Items without headers are read once.

    Raises:
        UserError: for pictures that cannot be used; it lists all of them.
    """
    seen = _seen(source, transforms, keys, skip, folder, keep)
    originals = seen.sizes
    assert originals is not None
    chosen, small = transforms.sized.chosen(originals.clamp(min=1))
    known = originals[:, 0] > 0
    small &= known
    chosen[~known] = chosen[known][:1]  # so that no size has unreadable pictures alone
    problems = misfits(seen.kinds, transforms)
    if small.any() and not transforms.upscale:
        problems.append(_too_small(source, transforms, originals, small))
    refuse(problems)
    channels = transforms.channels or _channels(source, seen, keys, transforms)
    used, numbers = torch.unique(chosen, return_inverse=True)
    sizes = transforms.sized.sizes
    shapes = [(channels, *sizes[number]) for number in used.tolist()]
    side = transforms.square
    assert side is not None
    return evolve(seen, shape=(channels, side, side)), Sized(shapes, numbers, originals, small)


def _seen(source: AnySource, transforms: Transforms, keys: ItemKeys, skip: bool, folder: Path, keep: bool) -> Survey:
    if (digest := source.fingerprint()) is None:
        return _read(source, transforms, keys, skip)
    path = place_of((FORMAT, _SIZES, source.kind, digest, keys), folder)

    def make(path: Path) -> None:
        seen = _read(source, transforms, keys, skip)
        sizes = seen.sizes
        assert sizes is not None

        def fill(rows: Any) -> Any:
            rows[_SIZES][:] = sizes.numpy()
            return facts_of(seen)

        save_table(path, {_SIZES: Column("int32", (len(source), 2))}, fill)

    def load(path: Path) -> Survey:
        facts, columns = read_table(path, len(source))
        if columns.keys() != {_SIZES} or columns[_SIZES].shape != (len(source), 2):
            raise ValueError("it is of other data")
        return evolve(survey_of(facts, (), len(source)), sizes=columns[_SIZES].long())

    if keep:
        seen = load_or_make(path, "table of sizes", load, make)
    elif (known := load_if_sound(path, "table of sizes", load)) is None:
        return _read(source, transforms, keys, skip)
    else:
        seen = known
    refuse([*source.problems, *unreadable_problems([*seen.unreadable.values()], len(source), skip)])
    return seen


def _read(source: AnySource, transforms: Transforms, keys: ItemKeys, skip: bool) -> Survey:
    """Read the headers of all pictures, or the items."""
    seen = survey(source, transforms, skip) if source.is_images else Survey()
    return evolve(seen, sizes=sizes_of(source, seen, keys))


def _channels(source: AnySource, seen: Survey, keys: ItemKeys, transforms: Transforms) -> int:
    if seen.kinds:
        return seen.kinds[0].channels
    image, *_ = picture_in(source, keys, 0, 0, 0)
    try:
        return int(evolve(transforms, upscale=True).fit(image, transforms.sized.nearest(*sides_of(image))).shape[0])
    except ValueError as error:
        raise UserError(f"sample 0 of the data: {error}") from error


def _too_small(source: AnySource, transforms: Transforms, originals: Tensor, small: Tensor) -> str:
    rows = small.nonzero().squeeze(1).tolist()
    names = [f"{source.name_of(row)} ({originals[row, 1]} x {originals[row, 0]})" for row in rows]
    side = min(transforms.sides)
    counts = f"{len(rows):,} of {len(small):,} images are smaller than their size with image_size = {side}"
    return f"{counts}; upscale = true enlarges them:{as_lines(names)}"
