"""Any source becomes samples of one shape, or is refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, define
from torch import Tensor

from hookdiff.data.memory import InMemory
from hookdiff.data.source import Images, Source
from hookdiff.data.store import GIB, Store, cache_of, fill, load_cache, locked, write_cache
from hookdiff.data.survey import Survey, check_readable, first_stage_shape, kind_of_shape, survey
from hookdiff.data.transforms import Transforms
from hookdiff.disk import cannot_write, make_folder
from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")

_MANY = 20_000  # headers: to read more takes seconds


@define(eq=False)
class Prepared:
    """A source after the first stage, or to be read sample by sample, and the facts about it."""

    samples: InMemory | Images | Source  # `InMemory`, or the source where each sample is read when it is needed
    labels: Tensor | None = None  # n, int64, on the CPU
    classes: Sequence[str] | None = None
    shape: tuple[int, ...] | None = None  # of a sample after the first stage; None: known once a sample is read
    place: str = "none"  # of the samples: "memory", "disk" or "none"
    survey: Survey = Factory(Survey)
    cache: Path | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def usable(self) -> Tensor:
        """The samples with a readable header: int64, sorted."""
        keep = torch.ones(len(self), dtype=torch.bool)
        keep[list(self.survey.unreadable)] = False
        return keep.nonzero().squeeze(1)


def prepare(source: Any, transforms: Transforms, store: Store) -> Prepared:
    """Survey `source`, and decode it if it is to be kept.

    Raises UserError for pictures that do not fit together or cannot be read, and TypeError for an object that is no
    source.
    """
    if isinstance(source, Tensor):
        source = InMemory(source)
    if isinstance(source, InMemory):
        prepared = _from_memory(source, transforms, store)
    elif isinstance(source, Images):
        prepared = _from_images(source, transforms, store)
    elif isinstance(source, Source):
        prepared = _from_items(source, store)
    else:
        raise TypeError(f"expected images, a tensor, or something with a length and [i], got {type(source).__name__}")
    if prepared.shape is not None and any(transforms.color_jitter) and prepared.shape[0] not in (1, 3):
        raise UserError(f"color_jitter is for images of 1 or 3 channels, these have {prepared.shape[0]}")
    return prepared


def _from_images(source: Images, transforms: Transforms, store: Store) -> Prepared:
    if not len(source):
        raise UserError("the source has no samples: nothing to train on")
    shape: tuple[int, ...]
    pixels, cache = None, None
    if store.store == "disk":
        place, cache = "disk", cache_of(source, transforms, store.folder)
        found, pixels = _cached(cache, source, transforms, store)
        shape = tuple(pixels.shape[1:])
    else:
        found, shape = _survey(source, transforms, store)
        place = store.place(len(source) * torch.Size(shape).numel())
        if place == "memory":
            pixels = _decoded(source, found, transforms, shape)
    unreadable = [*found.unreadable.values(), *found.undecodable.values()]
    check_readable(unreadable, len(source), store.unreadable == "skip")
    if unreadable:
        logger.warning(
            "data: %d of %d images cannot be read and are left out; the first is %s",
            *(len(unreadable), len(source), unreadable[0]),
        )
    samples = source if pixels is None else InMemory(pixels, source.labels, source.classes)
    return Prepared(samples, source.labels, source.classes, shape, place, found, cache)


def _survey(source: Images, transforms: Transforms, store: Store) -> tuple[Survey, tuple[int, int, int]]:
    """Return the survey, and the shape of the samples."""
    if len(source) > _MANY and not hasattr(source, "shape"):
        logger.info("data: reading the headers of %d images", len(source))
    found = survey(source)
    check_readable(found.unreadable.values(), len(source), store.unreadable == "skip")
    return found, first_stage_shape(found.kinds, transforms, source.describe)


def _decoded(source: Images, found: Survey, transforms: Transforms, shape: tuple[int, ...]) -> Tensor:
    size = len(source) * torch.Size(shape).numel() / GIB
    if size > 1 / 8:
        logger.info("data: decoding %d images into %.2f GiB of memory", len(source), size)
    try:
        pixels = torch.zeros(len(source), *shape, dtype=torch.uint8)
    except RuntimeError:
        raise UserError(f"store = 'memory': {size:.2f} GiB of pixels do not fit") from None
    fill(source, found, transforms, pixels)
    return pixels


def _cached(path: Path, source: Images, transforms: Transforms, store: Store) -> tuple[Survey, Tensor]:
    try:
        make_folder(path.parent)
        with locked(path):
            kept = load_cache(path)
            if kept is None:
                found, shape = _survey(source, transforms, store)
                logger.info("data: decoding %d images into %s", len(source), path)
                write_cache(path, source, found, transforms, shape)
                kept = load_cache(path)
    except OSError as error:
        raise cannot_write(path.parent, error) from None
    assert kept is not None
    return kept


def _from_memory(source: InMemory, transforms: Transforms, store: Store) -> Prepared:
    if store.store not in ("auto", "memory"):
        raise UserError(f"store = {store.store!r}: this source is in memory already")
    images, shape = source.images, tuple(source.images.shape[1:])
    are_pictures = len(shape) == 3 and shape[0] <= 4  # else they are latents, say
    found = Survey([kind_of_shape(shape, len(source))] if are_pictures else [])
    if len(source) and not transforms.fits(shape):
        if images.dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
            got = f"{' x '.join(map(str, shape))} of {images.dtype}"
            raise UserError(f"image_size and channels are for uint8 images of 1 or 3 channels; these are {got}")
        first_stage_shape(found.kinds, transforms, "sample {}".format)  # raises if they are too small
        source = InMemory(transforms.fit_stack(images), source.labels, source.classes)
    labels = None if source.labels is None else source.labels.cpu()
    return Prepared(source, labels, source.classes, tuple(source.images.shape[1:]), "memory", found)


def _from_items(source: Source, store: Store) -> Prepared:
    if store.store not in ("auto", "none"):
        raise UserError(
            f"store = {store.store!r}: the items of {type(source).__name__} may differ each time and are not kept; "
            "a source with load(i), or an InMemory, can be"
        )
    labels = getattr(source, "labels", None)
    if not (isinstance(labels, Tensor) and labels.shape == (len(source),)):
        return Prepared(source)
    return Prepared(source, labels.cpu(), getattr(source, "classes", None))
