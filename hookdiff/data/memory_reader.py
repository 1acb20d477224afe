"""The reader of data in memory, and helpers of all readers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import InMemory, check_range, to_unit_range
from hookdiff.errors import UserError, shown

if TYPE_CHECKING:
    from hookdiff.data.reader import Captions, Codec, Parts, Reader, Stack, TextEncoders
    from hookdiff.data.source import AnySource

_CPU = torch.device("cpu")
_AT_ONCE = 1 << 20  # pixel values that are fetched from memory in one go: 4 MiB in float32

# Takes stored samples and the epoch; None: no augmentation.
Finish = Callable[[Batch, int | None], Batch]


def checked_labels(labels: Any, classes: Sequence[str] | None, num: int) -> tuple[Tensor | None, Sequence[str] | None]:
    """Return labels (n = `num`) and the names of the classes, escaped; None for both if there are not `num` labels.

    Raises UserError for numbers that are no labels.
    """
    if not isinstance(labels, Tensor) or labels.shape != (num,):
        return None, None
    if num:
        low, high = int(labels.min()), int(labels.max())
        try:
            check_range(low, high)
        except ValueError as error:
            raise UserError(f"labels: {error}") from None
        if classes is not None and high >= len(classes):
            raise UserError(f"labels: {high} has no class: give labels below {len(classes)}")
    return labels.cpu(), None if classes is None else tuple(map(shown, classes))


def is_paired(shape: Sequence[int], picture: Sequence[int]) -> bool:
    """Return whether values of `shape` are an image, h w or c h w, of the height and width of a `picture` c h w."""
    return len(picture) == 3 and len(shape) in (2, 3) and tuple(shape[-2:]) == tuple(picture[1:])


def in_unit_range(samples: Batch, epoch: int | None = None) -> Batch:
    """Return the samples with uint8 inputs, and images among the conditions, as float32 in [-1, 1]."""
    columns = {
        name: to_unit_range(column)
        if column.dtype == torch.uint8 and is_paired(column.shape[1:], samples.inputs.shape[1:])
        else column
        for name, column in samples.conditions.items()
    }
    return evolve(samples, inputs=to_unit_range(samples.inputs), conditions=columns)


def hash_of(images: Tensor) -> str:
    """Return a hash of the dtype, shape and values of `images`."""
    digest = hashlib.sha256()
    for part in torch.split(images, 1024):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return f"{images.dtype} {tuple(images.shape)} {digest.hexdigest()}"


class PlainReader:
    """The optional members of a `Reader`, with their defaults."""

    inner: Reader | None = None
    source: AnySource | None = None
    cache_dir: str | None = None
    captions: Mapping[str, Captions] = {}
    texts: TextEncoders | None = None
    nothing: Mapping[str, Tensor | None] = {}
    shapes: Sequence[tuple[int, ...]] = ()
    shape_numbers: Tensor | None = None

    @property
    def digests(self) -> Mapping[str, str]:
        return {}

    def texts_of(self, indices: Tensor) -> dict[str, list[str]]:
        return {}

    def check(self) -> None:
        """Accept any samples."""

    def close(self) -> None:
        """Do nothing: there are no workers."""


@define(eq=False, slots=False)
class MemoryReader(PlainReader):
    """Reads the rows of a set in memory.

    finish: turns stored samples into inputs of the objective.
    rows: the position to read for each position in the set; None: the same position.
    places: the row of `samples` of each position in the set, if it holds only some of them; None: the same number.
    """

    samples: InMemory
    finish: Finish = in_unit_range
    rows: Tensor | None = None
    places: Tensor | None = None
    labels: Tensor | None = field(init=False)
    classes: Sequence[str] | None = field(init=False)
    left_out: Sequence[str] = ()
    unreadable: Collection[int] = ()
    codec: Codec | None = None
    device: torch.device = _CPU

    def __attrs_post_init__(self) -> None:
        self.labels, self.classes = checked_labels(self.samples.labels, self.samples.classes, len(self.samples))

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.samples.images.shape[1:])

    @cached_property
    def first(self) -> Batch:
        images, labels, conditions = self.samples.rows(torch.zeros(1, dtype=torch.int64))
        return self.finish(Batch(images, labels, conditions=conditions), None)

    @cached_property
    def are_pictures(self) -> bool:
        return are_pictures(self.samples.images)

    def bound(self, seed: int, device: torch.device, parts: Parts) -> MemoryReader:
        reader = copy(self)
        reader.samples, reader.device = self.samples.to(device), device
        return reader

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        if not shares:
            return
        samples = self.samples
        # Fetch several small batches at once and slice them: the calls take longer than copying the pixels.
        at_once = max(1, _AT_ONCE // (len(shares[0]) * samples.images[0].numel()))
        for first in range(0, len(shares), at_once):
            group = shares[first : first + at_once]
            if self.rows is not None:
                group = [self.rows[share] for share in group]
            sizes = [len(share) for share in group]
            indices = torch.cat(tuple(group))
            places = indices if self.places is None else self.places[indices]
            images, labels, conditions = samples.rows(places, self.device)
            batch = self.finish(Batch(images, labels, indices, conditions=conditions), epoch)
            inputs, by_batch = torch.split(batch.inputs, sizes), repeat(None)
            columns = {name: torch.split(column, sizes) for name, column in batch.conditions.items()}
            cut = ({name: parts[k] for name, parts in columns.items()} for k in range(len(group)))
            yield from zip(inputs, by_batch if labels is None else torch.split(labels, sizes), group, cut, strict=False)

    def describe(self, index: int) -> str:
        return f"sample {index}"

    def fingerprint(self) -> str | None:
        return hash_of(self.samples.images)


def are_pictures(images: Tensor) -> bool:
    """Return whether `images` (n c h w) are uint8, or floats in [-1, 1]; latents have other values."""
    if images.dim() < 4 or not images.is_floating_point():
        return images.dim() >= 4 and images.dtype == torch.uint8
    low, high = images.aminmax()
    return bool((low >= -1) & (high <= 1))
