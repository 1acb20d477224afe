"""Any source becomes samples of one shape, ready to be made batches of; what is wrong with it is told here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hookdiff.data.memory import InMemory
from hookdiff.data.source import Images, Source
from hookdiff.data.store import GIB, Cache, Store, fill
from hookdiff.data.survey import Survey, check_readable, first_stage_shape, survey
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")

_MANY = 20_000  # headers, that take seconds


@define(eq=False)
class Prepared:
    """Samples after the first stage, or the way to them, and what is known of them."""

    source: InMemory | Images | Source  # as it was given
    transforms: Transforms
    store: Store
    samples: InMemory | Images | Source  # `InMemory`, or `source` where samples are read when they are due
    labels: Tensor | None = None  # n, int64, on the CPU
    classes: Sequence[str] | None = None
    shape: tuple[int, ...] | None = None  # of a sample after the first stage; None: only reading one tells
    place: str = "none"  # where samples live: "memory", "disk" or "none"
    survey: Survey | None = None
    torn: dict[int, str] | None = None  # what turned out unreadable behind its header; None: nobody has looked
    cache: Cache | None = None

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        """Return what a user knows the sample by: its file, or its number."""
        describe: Callable[[int], str] | None = getattr(self.source, "describe", None)
        return f"sample {index}" if describe is None else describe(index)

    @property
    def usable(self) -> Tensor:
        """The samples whose header could be read: int64, in order."""
        keep = torch.ones(len(self), dtype=torch.bool)
        if self.survey is not None and self.survey.unreadable:
            keep[list(self.survey.unreadable)] = False
        return keep.nonzero().squeeze(1)


def prepare(source: Any, transforms: Transforms, store: Store) -> Prepared:
    """Look at all of `source`, and decode it where it is to be kept.

    Raises UserError for pictures that cannot be used together, or cannot be read; TypeError for what is no source.
    """
    if isinstance(source, Tensor):
        source = InMemory(source)
    if isinstance(source, InMemory):
        return _from_tensor(source, transforms, store)
    if not isinstance(source, Images):
        return _from_items(source, transforms, store)
    if not len(source):
        raise UserError("the source has no samples: nothing to train on")
    prepared = _on_disk(source, transforms, store) if store.store == "disk" else _in_memory(source, transforms, store)
    _check_colour(prepared.shape, transforms)
    unreadable = [*(prepared.survey or Survey()).unreadable.values(), *(prepared.torn or {}).values()]
    check_readable(unreadable, len(source), store.unreadable == "skip")
    if unreadable:
        logger.warning(
            "data: %d of %d images cannot be read and are left out, as %s", len(unreadable), len(source), unreadable[0]
        )
    return prepared


def _in_memory(source: Images, transforms: Transforms, store: Store) -> Prepared:
    found, shape = _look(source, transforms, store)
    prepared = Prepared(source, transforms, store, source, source.labels, source.classes, shape, survey=found)
    num_bytes = len(source) * torch.Size(shape).numel()
    prepared.place = store.place(num_bytes)
    if prepared.place == "memory":
        if num_bytes > GIB // 8:
            logger.info("data: decoding %d images into %.2f GiB of memory", len(source), num_bytes / GIB)
        try:
            pixels = torch.zeros(len(source), *shape, dtype=torch.uint8)
        except RuntimeError:
            raise UserError(f"store = 'memory': there is no room for {num_bytes / GIB:.2f} GiB of pixels") from None
        prepared.torn = fill(source, prepared.usable.tolist(), transforms, pixels)
        prepared.samples = InMemory(pixels, source.labels, source.classes)
    return prepared


def _on_disk(source: Images, transforms: Transforms, store: Store) -> Prepared:
    cache = Cache.of(source, transforms, store.folder)
    with cache.locked():
        kept = cache.load()
        if kept is None:
            found, shape = _look(source, transforms, store)
            logger.info("data: decoding %d images into %s", len(source), cache.path)
            cache.build(source, found, transforms, shape)
            kept = cache.load()
            assert kept is not None
    found, pixels, torn = kept
    samples = InMemory(pixels, source.labels, source.classes)
    about = source.labels, source.classes, tuple(pixels.shape[1:]), "disk", found, torn, cache
    return Prepared(source, transforms, store, samples, *about)


def _look(source: Images, transforms: Transforms, store: Store) -> tuple[Survey, tuple[int, int, int]]:
    if len(source) > _MANY and not hasattr(source, "shape"):
        logger.info("data: looking at the headers of %d images", len(source))
    found = survey(source)
    check_readable(found.unreadable.values(), len(source), store.unreadable == "skip")
    return found, first_stage_shape(found, transforms, source.describe)


def _from_tensor(source: InMemory, transforms: Transforms, store: Store) -> Prepared:
    if store.store not in ("auto", "memory"):
        raise UserError(f"store = {store.store!r}: this source is in memory already")
    labels = None if source.labels is None else source.labels.cpu()
    prepared = Prepared(source, transforms, store, source, labels, source.classes, place="memory")
    shape = tuple(source.images.shape[1:])
    if len(source) and not transforms.fits(shape):
        told = " x ".join(map(str, shape))
        if source.images.dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(
                f"image_size and channels are for uint8 images of 1 or 3 channels; these are {told} of "
                f"{source.images.dtype}"
            )
        if transforms.side and min(shape[1:]) < transforms.side and not transforms.upscale:
            key = "resize" if transforms.resize else "image_size"
            raise UserError(
                f"the images, {told}, are smaller than {key} = {transforms.side}; upscale = true enlarges them"
            )
        fitted = transforms.fit_stack(source.images)
        prepared.samples, shape = InMemory(fitted, source.labels, source.classes), tuple(fitted.shape[1:])
    prepared.shape = shape
    _check_colour(shape, transforms)
    return prepared


def _from_items(source: Any, transforms: Transforms, store: Store) -> Prepared:
    if not isinstance(source, Source):
        raise TypeError(f"expected images, a tensor, or something with a length and [i], got {type(source).__name__}")
    if store.store not in ("auto", "none"):
        raise UserError(
            f"store = {store.store!r}: the items of {type(source).__name__} may differ each time and are not kept; "
            "a source with load(i), or an InMemory, can be"
        )
    labels = getattr(source, "labels", None)
    labels = labels.cpu() if isinstance(labels, Tensor) and labels.shape == (len(source),) else None
    classes = getattr(source, "classes", None) if labels is not None else None
    return Prepared(source, transforms, store, source, labels, classes)


def _check_colour(shape: tuple[int, ...] | None, transforms: Transforms) -> None:
    if shape is not None and any(transforms.color_jitter) and shape[0] not in (1, 3):
        raise UserError(f"color_jitter is for images of 1 or 3 channels, these have {shape[0]}")
