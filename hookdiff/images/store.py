"""Turns any source into samples, kept in memory, in a memory-mapped file, or decoded anew each time."""

import logging
import math
import operator
import os
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from attrs import Factory, define, evolve, field
from attrs.validators import ge, in_
from torch import Tensor

from hookdiff.data.memory import InMemory
from hookdiff.data.memory_reader import hash_of, is_paired
from hookdiff.data.source import AnySource, Images, Source
from hookdiff.disk.paths import user_cache
from hookdiff.errors import UserError
from hookdiff.images.cache import key_of, load_or_decode, place_of
from hookdiff.images.decoding import Unreadable
from hookdiff.images.items import ItemKeys
from hookdiff.images.parallel_reading import with_images
from hookdiff.images.sized import Sized, look
from hookdiff.images.survey import (
    Survey,
    first_stage_shape,
    kind_of_shape,
    left_out_text,
    passed_over_text,
    refuse,
    survey,
    unreadable_problems,
)
from hookdiff.images.transforms import Transforms, size_text
from hookdiff.options.fields import Writes, about
from hookdiff.terminal.words import byte_size

logger = logging.getLogger("hookdiff")

_GIB = 1 << 30


@define(frozen=True, kw_only=True)
class Store:
    """Options for storing decoded and resized samples, and for samples that cannot be read."""

    store: Literal["auto", "memory", "disk", "none"] = field(
        default="auto",
        validator=in_(("auto", "memory", "disk", "none")),
        metadata=about(
            'where decoded and resized samples are kept: "memory"; "disk" (a file); "none" (they are decoded again in '
            'each epoch); "auto" ("memory" up to `memory_limit`, else "none")'
        ),
    )
    memory_limit: float = field(
        default=4.0, validator=ge(0), metadata=about('limit of "auto" for the decoded pixels', "GiB")
    )
    cache_dir: Annotated[str | None, Writes()] = field(
        default=None, metadata=about('folder for the files of "disk"; default: `hookdiff` in the user\'s cache folder')
    )
    unreadable: Literal["stop", "skip"] = field(
        default="stop",
        validator=in_(("stop", "skip")),
        metadata=about('what to do if samples cannot be read: "stop", or "skip" them with a warning'),
    )

    @property
    def folder(self) -> Path:
        return Path(os.path.expanduser(self.cache_dir)) if self.cache_dir else user_cache()

    def place(self, num_bytes: int) -> str:
        """Return where this number of bytes is kept: "memory", "disk" or "none"."""
        if self.store != "auto":
            return self.store
        return "memory" if num_bytes <= self.memory_limit * _GIB else "none"

    def in_memory(self, num_bytes: int) -> bool:
        """Return whether this number of bytes is kept in memory."""
        return self.place(num_bytes) == "memory"


@define(eq=False)
class Prepared:
    """Decoded and resized samples, or a source that reads each sample when it is needed."""

    samples: InMemory | Images | Source
    place: str = "none"  # of the samples: "memory", "disk" or "none"
    survey: Survey = Factory(Survey)
    cache: Path | None = None  # the folder on disk
    left_out: Sequence[str] = ()  # the parts of the source that are not used, in words
    sized: Sized | None = None  # the sizes of the samples; None: all have one size
    by_size: Sequence[InMemory] = ()  # if the samples are kept, those of each size

    @property
    def bytes_on_disk(self) -> int:
        """The size of the pixels on disk."""
        kept = [part for part in (*self.by_size, self.samples) if isinstance(part, InMemory)]
        return sum(part.images.nbytes for part in kept) if self.place == "disk" else 0


def prepare(source: AnySource, transforms: Transforms, store: Store, keys: ItemKeys) -> Prepared:
    """Read the headers of `source`, and decode its pictures if `store` keeps them.

    Raises UserError for pictures of different shapes or that cannot be read.
    """
    if transforms.has_sizes:
        prepared = _in_sizes(source, transforms, store, keys)
    elif source.memory is not None:
        prepared = _from_memory(source.memory, transforms, store)
    elif source.is_images:
        prepared = _from_images(source, transforms, store)
    else:
        _check_items(source, store)
        prepared = Prepared(source.items)
    shape = prepared.survey.shape
    if shape and any(transforms.color_jitter) and shape[0] not in (1, 3):
        raise UserError(f"color_jitter is for images of 1 or 3 channels, these have {shape[0]}")
    return prepared


def _check_items(source: AnySource, store: Store) -> None:
    if store.store not in ("auto", "none"):
        items = f"the items of {type(source.origin).__name__} may differ each time"
        raise UserError(f"store = {store.store!r}: {items}; only an InMemory, or a source with load(i), can be kept")


def _from_images(source: AnySource, transforms: Transforms, store: Store) -> Prepared:
    if not len(source):
        raise UserError("the source has no samples; give one with samples to train on")
    pixels, cache, skip, num = None, None, store.unreadable == "skip", len(source)
    if store.store == "disk":
        place, cache = "disk", place_of(_key_on_disk(source, transforms), store.folder)
        fill = partial(_fill, None, source=source, transforms=transforms)
        read = partial(survey, source, transforms, skip)
        seen, pixels = load_or_decode(cache, num, num, read, transforms.fits, fill)
    else:
        seen = survey(source, transforms, skip)
        place = store.place(num * torch.Size(seen.shape).numel())
        if place == "memory":
            pixels = _decode_to_memory(None, (num, *seen.shape), seen, source, transforms)
    left_out = _left_out(source, seen, skip)
    return Prepared(source.origin if pixels is None else InMemory(pixels, source.labels), place, seen, cache, left_out)


def _in_sizes(source: AnySource, transforms: Transforms, store: Store, keys: ItemKeys) -> Prepared:
    """Prepare pictures in several sizes; kept pixels are in a table for each size."""
    skip, on_disk = store.unreadable == "skip", store.store == "disk"
    if not len(source):
        raise UserError("the source has no samples; give one with samples to train on")
    if source.memory is not None:
        raise one_size()
    key = _key_on_disk(source, transforms) if on_disk and source.is_images else None
    seen, sized = look(source, transforms, keys, skip, store.folder, keep=on_disk)
    if not source.is_images:
        _check_items(source, store)
        return Prepared(source.items, survey=seen, sized=sized)
    rows = [sized.rows(number, seen.unreadable) for number in range(len(sized.shapes))]
    place = store.place(sum(len(own) * math.prod(shape) for own, shape in zip(rows, sized.shapes, strict=True)))
    kept = list[InMemory]()
    for own, shape in zip(rows, sized.shapes, strict=True) if place != "none" else ():
        if key is None:
            pixels = _decode_to_memory(own, (len(own), *shape), seen, source, transforms)
        else:
            path = place_of((*key, shape, hash_of(own)), store.folder)
            fill = partial(_fill, own, source=source, transforms=transforms)
            known, fits = Survey(shape), partial(operator.eq, torch.Size(shape))
            part, pixels = load_or_decode(path, len(own), len(source), partial(copy, known), fits, fill)
            seen.undecodable |= part.undecodable
        kept.append(InMemory(pixels, None if source.labels is None else source.labels[own]))
    left_out = _left_out(source, seen, skip)
    return Prepared(source.origin, place, seen, store.folder if key else None, left_out, sized, kept)


def one_size() -> UserError:
    """Return the error about several sizes of samples for a source in memory."""
    return UserError("buckets, or several sides in image_size: this source has pictures of one size; leave them out")


def _key_on_disk(source: AnySource, transforms: Transforms) -> tuple[Any, ...]:
    if (key := key_of(source, transforms)) is None:
        name = type(source.origin).__name__
        raise UserError(f"store = 'disk' needs a fingerprint() of {name}, to see when its data has changed")
    return key


def _left_out(source: AnySource, seen: Survey, skip: bool) -> list[str]:
    """Return the parts of the source that are not used, in words, and log them. Raises UserError for faults."""
    unreadable = [*seen.unreadable.values(), *seen.undecodable.values()]
    refuse([*unreadable_problems(unreadable, len(source), skip), *source.problems])
    left_out = [*left_out_text(unreadable, len(source)), *passed_over_text(source)]
    for text in left_out:
        logger.warning("data: %s", text)
    return left_out


def _from_memory(source: InMemory, transforms: Transforms, store: Store) -> Prepared:
    if store.store not in ("auto", "memory"):
        raise UserError(f"store = {store.store!r}: this source is in memory; leave store out, or set 'memory'")
    images, shape = source.images, tuple(source.images.shape[1:])
    are_pictures = len(shape) == 3 and shape[0] <= 4  # others may be latents
    kinds = [kind_of_shape(shape, len(source), "sample 0")] if are_pictures else []
    if len(source) and not transforms.fits(shape):
        if images.dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
            got = f"{size_text(shape)} of {images.dtype}"
            raise UserError(f"image_size and channels are for uint8 images of 1 or 3 channels; these are {got}")
        shape = first_stage_shape(kinds, transforms)
        conditions = {
            name: _fit_condition(name, column, images, transforms) for name, column in source.conditions.items()
        }
        source = InMemory(_fit_all(images, transforms), source.labels, None, conditions, source.texts)
    return Prepared(source, "memory", Survey(shape, kinds))


def _fit_all(images: Tensor, transforms: Transforms) -> Tensor:
    return torch.cat([transforms.fit_stack(chunk) for chunk in torch.split(images, 1024)])


def _fit_condition(name: str, column: Tensor, images: Tensor, transforms: Transforms) -> Tensor:
    """Return the first stage of conditions that are images of the same size as `images`, others as they are."""
    shape, sides = column.shape, images.shape[2:]
    if not is_paired(shape[1:], images.shape[1:]) or transforms.side is None or sides == (transforms.side,) * 2:
        return column
    if column.dtype != torch.uint8:
        raise UserError(f"conditions {name!r}: only uint8 can be resized with the images; these are {column.dtype}")
    fitted = _fit_all(column.reshape(-1, 1, *sides), evolve(transforms, channels=None))
    return fitted.reshape(*shape[:-2], *fitted.shape[2:])


def _decode_to_memory(
    rows: Tensor | None, shape: tuple[int, ...], seen: Survey, source: AnySource, transforms: Transforms
) -> Tensor:
    size = math.prod(shape)
    if size > _GIB / 8:
        logger.info("data: decoding %s images into %s of memory", f"{shape[0]:,}", byte_size(size))
    try:
        pixels = torch.zeros(shape, dtype=torch.uint8)
    except RuntimeError:
        raise UserError(f"store = 'memory': {byte_size(size)} do not fit; set store = 'disk' or 'none'") from None
    _fill(rows, pixels.numpy(), seen, source, transforms)
    return pixels


def _fill(rows: Tensor | None, pixels: Any, seen: Survey, source: AnySource, transforms: Transforms) -> None:
    """Write the first stage of the samples `rows` to `pixels` (n c h w, uint8); None: of all samples.

    Unreadable samples stay zero.
    """
    indices = range(len(source)) if rows is None else rows.tolist()
    places = {index: place for place, index in enumerate(indices) if index not in seen.unreadable}
    decode = partial(_decoded, transforms=transforms, shape=pixels.shape[1:])
    for index, values in with_images(source, [*places], decode, "data: decoding"):
        if isinstance(values, Unreadable):
            seen.undecodable[index] = str(values)
        else:
            pixels[places[index]] = values


def _decoded(image: Any, transforms: Transforms, shape: tuple[int, ...]) -> Any:
    return transforms.fit_to(image, shape).numpy()
