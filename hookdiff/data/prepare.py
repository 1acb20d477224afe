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
from hookdiff.disk import cannot_write
from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")

_MANY = 20_000  # headers: to read more takes seconds


@define(eq=False)
class Prepared:
    """A source after the first stage, or to be read sample by sample, and the facts about it."""

    samples: InMemory | Images | Source  # `InMemory`, or the source if each sample is read when it is needed
    labels: Tensor | None = None  # n, int64, on the CPU
    classes: Sequence[str] | None = None
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
    shape = prepared.survey.shape
    if shape and any(transforms.color_jitter) and shape[0] not in (1, 3):
        raise UserError(f"color_jitter is for images of 1 or 3 channels, these have {shape[0]}")
    return prepared


def _from_images(source: Images, transforms: Transforms, store: Store) -> Prepared:
    if not len(source):
        raise UserError("the source has no samples: nothing to train on")
    pixels, cache = None, None
    if store.store == "disk":
        place, cache = "disk", cache_of(source, transforms, store.folder)
        found, pixels = _cached(cache, source, transforms, store)
    else:
        found = _survey(source, transforms, store)
        place = store.place(len(source) * torch.Size(found.shape).numel())
        if place == "memory":
            pixels = _decoded(source, found, transforms)
    unreadable = [*found.unreadable.values(), *found.undecodable.values()]
    check_readable(unreadable, len(source), store.unreadable == "skip")
    if unreadable:
        counts = f"{len(unreadable)} of {len(source)} images"
        logger.warning("data: %s cannot be read and are left out; the first is %s", counts, unreadable[0])
    samples = source if pixels is None else InMemory(pixels, source.labels, source.classes)
    return Prepared(samples, source.labels, source.classes, place, found, cache)


def _survey(source: Images, transforms: Transforms, store: Store) -> Survey:
    if len(source) > _MANY and not hasattr(source, "shape"):
        logger.info("data: reading the headers of %d images", len(source))
    found = survey(source)
    check_readable(found.unreadable.values(), len(source), store.unreadable == "skip")
    found.shape = first_stage_shape(found.kinds, transforms)
    return found


def _decoded(source: Images, found: Survey, transforms: Transforms) -> Tensor:
    shape = (len(source), *found.shape)
    size = torch.Size(shape).numel() / GIB
    if size > 1 / 8:
        logger.info("data: decoding %d images into %.2f GiB of memory", len(source), size)
    try:
        pixels = torch.zeros(shape, dtype=torch.uint8)
    except RuntimeError:
        raise UserError(f"store = 'memory': {size:.2f} GiB of pixels do not fit") from None
    fill(source, found, transforms, pixels)
    return pixels


def _cached(path: Path, source: Images, transforms: Transforms, store: Store) -> tuple[Survey, Tensor]:
    try:
        with locked(path):
            kept = load_cache(path)
            if kept is None:
                logger.info("data: decoding %d images into %s", len(source), path)
                write_cache(path, source, _survey(source, transforms, store), transforms)
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
    kinds = [kind_of_shape(shape, len(source), "sample 0")] if are_pictures else []
    if len(source) and not transforms.fits(shape):
        if images.dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
            got = f"{' x '.join(map(str, shape))} of {images.dtype}"
            raise UserError(f"image_size and channels are for uint8 images of 1 or 3 channels; these are {got}")
        shape = first_stage_shape(kinds, transforms)
        fitted = torch.cat([transforms.fit_stack(chunk) for chunk in torch.split(images, 1024)])
        source = InMemory(fitted, source.labels, source.classes)
    labels = None if source.labels is None else source.labels.cpu()
    return Prepared(source, labels, source.classes, "memory", Survey(shape, kinds))


def _from_items(source: Source, store: Store) -> Prepared:
    if store.store not in ("auto", "none"):
        items = f"the items of {type(source).__name__} may differ each time"
        raise UserError(f"store = {store.store!r}: {items}; only an InMemory, or a source with load(i), can be kept")
    labels = getattr(source, "labels", None)
    if not (isinstance(labels, Tensor) and labels.shape == (len(source),)):
        return Prepared(source)
    return Prepared(source, labels.cpu(), getattr(source, "classes", None))
