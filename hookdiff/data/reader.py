"""What a Feed reads its samples from: the protocol of readers, and the reader of data in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import InMemory, check_range, to_unit_range
from hookdiff.errors import UserError, shown

_CPU = torch.device("cpu")
_AT_ONCE = 1 << 20  # pixel values that are fetched from memory in one go: 4 MiB in float32

# Of the samples of a batch, each with a row: inputs as the objective gets them, labels (int64), positions (int64, CPU),
# and conditions by name.
Stack = tuple[Tensor, Tensor | None, Tensor, Mapping[str, Tensor]]
Parts = Sequence[Tensor]  # the samples to train on and those held out: n, int64, positions in the whole set
Finish = Callable[[Batch, int | None], Batch]  # takes samples as they are stored, and the epoch; None: no augmentation


class Codec(Protocol):
    """Makes inputs of pictures, and pictures of inputs: for an autoencoder, of which a run trains the latents."""

    shape: tuple[int, ...]  # of a picture, c h w
    digest: str  # changes with what it makes
    encoder: Any  # part of the config, that opens its network

    @property
    def pictures(self) -> Any:
        """The Feed of the pictures, which is made when it is first asked for."""

    def encode(self, pictures: Tensor) -> Tensor:
        """Return the inputs (n c h w) for `pictures` (n c h w in [-1, 1]), always the same, on the same device."""

    def decode(self, inputs: Tensor) -> Tensor:
        """Return the pictures (n c h w, float32, about in [-1, 1]) of `inputs` (n c h w), on the same device."""


class Reader(Protocol):
    """Reads, decodes and augments the samples of a Feed, which keeps their order and makes batches of them.

    `MemoryReader` has them in memory; `hookdiff.images` has the reader of pictures and of any other source.
    """

    @property
    def samples(self) -> Any:
        """The `InMemory` set that holds all samples, or the source that is asked for each of them."""

    labels: Tensor | None  # of the whole set: n, int64, on the CPU (-1: unknown)
    classes: Sequence[str] | None  # the names of the classes
    left_out: Sequence[str]  # what of the source is not used, in words
    unreadable: Collection[int]  # positions of samples that no batch may hold
    codec: Codec | None  # of what the samples were made of pictures by

    def __len__(self) -> int:
        """Return the number of samples in the whole set."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, c h w; the first sample is read if nothing else gives it."""

    @property
    def first(self) -> Batch:
        """A batch of the first sample; of pictures, which have no conditions, its pixels may be zeros."""

    @property
    def are_pictures(self) -> bool:
        """Whether the samples are pictures, with values in [-1, 1]: no vectors or latents."""

    def bound(self, seed: int, device: torch.device, parts: Parts) -> Reader:
        """Return a copy that reads for a run with this seed, on this device."""

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        """Yield the samples at each of `shares` (n, int64), augmented as in `epoch`; None: without augmentation."""

    def check(self) -> None:
        """Raise UserError for samples that do not fit the options."""

    def describe(self, index: int) -> str:
        """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""

    def fingerprint(self) -> str | None:
        """Return a hash that changes with the samples without augmentation; None if there is none."""

    def close(self) -> None:
        """End the workers that wait for another epoch; a later epoch starts new ones."""


def labels_of(source: Any, num: int) -> tuple[Tensor | None, Sequence[str] | None]:
    """Return the labels of the `num` samples of `source`, and the names of the classes, escaped; None without labels.

    Raises UserError for numbers that are no labels.
    """
    labels, classes = getattr(source, "labels", None), getattr(source, "classes", None)
    if not isinstance(labels, Tensor) or labels.shape != (num,):
        return None, None
    if num:
        low, high = int(labels.min()), int(labels.max())
        try:
            check_range(low, high)
        except ValueError as error:
            raise UserError(f"labels: {error}") from None
        if classes is not None and high >= len(classes):
            raise UserError(f"labels: {high} is the number of no class, there are {len(classes)}")
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
    """Return a hash of the dtype, the shape and the values of `images`."""
    digest = hashlib.sha256()
    for part in torch.split(images, 1024):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return f"{images.dtype} {tuple(images.shape)} {digest.hexdigest()}"


@define(eq=False, slots=False)
class MemoryReader:
    """Reads the rows of a set in memory.

    finish: makes samples for the objective of samples as they are stored.
    rows: for each position in the set, the row of `samples` that is read; None: the same.
    """

    samples: InMemory
    finish: Finish = in_unit_range
    rows: Tensor | None = None
    labels: Tensor | None = field(init=False)
    classes: Sequence[str] | None = field(init=False)
    left_out: Sequence[str] = ()
    unreadable: Collection[int] = ()
    codec: Codec | None = None
    device: torch.device = _CPU

    def __attrs_post_init__(self) -> None:
        self.labels, self.classes = labels_of(self.samples, len(self.samples))

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
        one = copy(self)
        one.samples, one.device = self.samples.to(device), device
        return one

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
            images, labels, conditions = samples.rows(indices, self.device)
            made = self.finish(Batch(images, labels, indices, conditions=conditions), epoch)
            inputs, by_batch = torch.split(made.inputs, sizes), repeat(None)
            columns = {name: torch.split(column, sizes) for name, column in made.conditions.items()}
            cut = ({name: parts[k] for name, parts in columns.items()} for k in range(len(group)))
            yield from zip(inputs, by_batch if labels is None else torch.split(labels, sizes), group, cut, strict=False)

    def check(self) -> None:
        """Take any samples."""

    def describe(self, index: int) -> str:
        return f"sample {index}"

    def fingerprint(self) -> str | None:
        return hash_of(self.samples.images)

    def close(self) -> None:
        """Have no workers to end."""


def are_pictures(images: Tensor) -> bool:
    """Return whether `images` (n c h w) are uint8, or floats in [-1, 1]; latents have other values."""
    if images.dim() < 4 or not images.is_floating_point():
        return images.dim() >= 4 and images.dtype == torch.uint8
    low, high = images.aminmax()
    return bool((low >= -1) & (high <= 1))
