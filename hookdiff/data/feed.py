"""The batches of a run: which samples, in which order, on which rank.

All of it is a pure function of (seed, epoch, samples consumed), so a run resumes at any sample, and the number of
workers changes nothing. Prefetched batches that were not consumed are simply made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from attrs import define, field, validators
from torch import Generator, Tensor

from hookdiff.data.augment import augment, plain
from hookdiff.data.batch import Batch
from hookdiff.data.loader import ImageReader, ItemReader, Loader
from hookdiff.data.memory import InMemory, count_classes
from hookdiff.data.order import balanced, split, stand_ins, successors
from hookdiff.data.prepare import Prepared, prepare
from hookdiff.data.source import Images, Source
from hookdiff.data.store import Store
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError
from hookdiff.randomness import derive_seed

logger = logging.getLogger("hookdiff")

_AT_ONCE = 1 << 20  # numbers that are fetched from memory in one go: 4 MiB

Finish = Callable[[Tensor, Tensor], Tensor]  # first-stage images and indices -> inputs


def _is_amount(_: Any, __: Any, held_out: int | float) -> None:
    if not held_out >= 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"must be a count, or a share from 0 to below 1: {held_out}")


@define(eq=False)
class Feed:
    """Hands out the epochs of `source` in batches, this rank's share of each.

    `source` is a tensor n c h w, an `InMemory` set, `Images` (see `hookdiff.data.Folder`), or anything else with a
    length and `[i]` (see `Source`); what is read sample by sample goes through a DataLoader. All keys belong to the
    config table [data].

    Raises UserError when the source cannot be used so, TypeError when it is none.
    """

    source: Any = field()
    transforms: Transforms = field(factory=Transforms, kw_only=True)
    store: Store = field(factory=Store, kw_only=True)
    held_out: int | float = field(default=0, validator=_is_amount, kw_only=True)  # a count, or a share
    balanced: bool = field(default=False, kw_only=True)  # each class equally often in an epoch
    drop_last: bool = field(default=True, kw_only=True)  # leave out the last, smaller batch of an epoch
    workers: int = field(default=0, validator=validators.ge(0), kw_only=True)  # processes that load samples
    prefetch: int = field(default=2, validator=validators.ge(1), kw_only=True)  # batches ahead, per worker
    pin_memory: bool = field(default=True, kw_only=True)  # where the device is a GPU
    prepared: Prepared = field(init=False, repr=False)  # what became of `source`
    batch_size: int = field(init=False, default=0)  # over all ranks
    seed: int = field(init=False, default=0)
    device: torch.device = field(init=False, default=torch.device("cpu"))
    rank: int = field(init=False, default=0)
    num_ranks: int = field(init=False, default=1)
    samples: InMemory | Images | Source = field(init=False)  # on the device where there is room
    training: Tensor = field(init=False)  # n, int64, sorted: positions of what is trained on
    held: Tensor = field(init=False)  # the same of what is held out
    _rows: Tensor | None = field(init=False, default=None)  # of each sample; not its own if that is torn
    _told: set[int] = field(init=False, factory=set)  # the torn samples that were told of
    _idle: list[Loader] = field(init=False, factory=list)  # whose epoch is over; their workers wait for the next

    def __attrs_post_init__(self) -> None:
        data = self.prepared = prepare(self.source, self.transforms, self.store)
        if self.balanced and data.labels is None:
            raise UserError("balanced: the source has no labels")
        self.samples = data.samples
        self.training, self.held = split(data.usable, data.labels, self.held_out)
        if data.torn:
            torn = torch.zeros(len(data), dtype=torch.bool)
            torn[list(data.torn)] = True
            self._rows = stand_ins(self._following, torn)

    @classmethod
    def of(cls, data: Feed | InMemory | Images | Source | Tensor) -> Feed:
        """Return `data` as a Feed of its own: two Loops may be given the same."""
        return copy(data) if isinstance(data, Feed) else cls(data)

    def bind(
        self,
        batch_size: int,
        seed: int = 0,
        device: torch.device = torch.device("cpu"),  # noqa: B008 a constant
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Feed:
        """Set what batches are made: `batch_size` samples over all ranks, in the order that `seed` gives.

        Raises UserError when the source cannot fill one batch, or a batch not all ranks.
        """
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.rank, self.num_ranks, self._idle = rank, num_ranks, []
        if isinstance(self.samples, InMemory):
            self.samples = self.samples.to(device)
        if self.batch_size < num_ranks:
            raise UserError(f"batch_size is {self.batch_size}: too small for {num_ranks} ranks")
        if self.exhausted(0):
            way_out = "lower batch_size or set drop_last = false" if len(self.training) else "nothing to train on"
            raise UserError(f"the data has {len(self.training)} samples, batch_size is {self.batch_size}: {way_out}")
        if self.transforms.random and len(self.shape) != 3:
            raise UserError(f"the data is no images c h w but {' x '.join(map(str, self.shape))}: nothing to augment")
        return self

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, c h w; of the first, where only loading one tells."""
        shape = self.prepared.shape
        if shape is None:
            (images, _, _) = next(self._loader(0).load(0, [torch.zeros(1, dtype=torch.int64)]))
            shape = tuple(images.shape[1:])
        size = self.transforms.image_size
        return shape if size is None else (shape[0], size, size)

    @property
    def labels(self) -> Tensor | None:
        """The labels of the whole set: n, int64, on the CPU (-1: unknown). None if there are none, or nobody knows."""
        labels: Tensor | None = self.prepared.labels
        return labels

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes."""
        classes: Sequence[str] | None = self.prepared.classes
        return classes

    @property
    def num_classes(self) -> int | None:
        """The number of classes; None without labels."""
        return count_classes(self.labels, self.classes)

    def describe(self, index: int) -> str:
        """Return what a user knows the sample at `index` of the set by: its file, or "sample 12"."""
        return str(self.prepared.describe(index))

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        total = len(self.training)
        rest = total % self.batch_size
        return total - rest if self.exhausted(total - rest) else total

    @property
    def num_batches(self) -> int:
        """The number of batches of an epoch."""
        return -(-len(self) // self.batch_size)

    def exhausted(self, start: int) -> bool:
        """Whether an epoch of which `start` samples are consumed has no further batch."""
        # A rest that is too small for each rank to get a sample is left out too.
        least = self.batch_size if self.drop_last else self.num_ranks
        return len(self.training) - start < least

    def order(self, epoch: int) -> Tensor:
        """Return the samples of epoch `epoch` in their order: int64, positions in the whole set."""
        generator = Generator().manual_seed(derive_seed(self.seed, "data", epoch))
        if self.balanced:
            assert self.labels is not None
            return self.training[balanced(self.labels[self.training], generator)]
        return self.training[torch.randperm(len(self.training), generator=generator)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `epoch` from the sample number `start` of its order on."""
        order = self.order(epoch)
        parts = []
        while not self.exhausted(start):
            parts.append(order[start : start + self.batch_size])
            start += self.batch_size

        def finish(images: Tensor, indices: Tensor) -> Tensor:
            return augment(images, self.transforms, self.seed, epoch, indices)

        yield from self._make(epoch, parts, self.rank, self.num_ranks, finish)

    def plain(self, indices: Tensor, batch_size: int = 256) -> Iterator[Batch]:
        """Yield the samples `indices` (n, int64), such as those held out, in this order and not augmented.

        A random crop becomes the centre. A `Source` that augments on its own does so as in epoch 0.
        """
        parts = torch.split(indices, batch_size) if len(indices) else ()
        yield from self._make(0, parts, 0, 1, lambda images, _: plain(images, self.transforms))

    def _make(self, epoch: int, parts: Sequence[Tensor], rank: int, num_ranks: int, finish: Finish) -> Iterator[Batch]:
        shares = [part[rank::num_ranks] for part in parts]
        made = self._fetch(self.samples, shares, finish) if isinstance(self.samples, InMemory) else None
        for part, batch in zip(parts, made or self._load(epoch, shares, finish), strict=True):
            yield Batch(*batch, total=len(part))

    def _fetch(
        self, samples: InMemory, shares: list[Tensor], finish: Finish
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        if not shares:
            return
        # Several small batches at once, then slices of them: the calls cost more than the pixels.
        at_once = max(1, _AT_ONCE // (len(shares[0]) * samples.images[0].numel()))
        for first in range(0, len(shares), at_once):
            group = shares[first : first + at_once]
            if self._rows is not None:
                group = [self._rows[share] for share in group]
            sizes = [len(share) for share in group]
            together = torch.cat(group)
            images, labels = samples.rows(together, self.device)
            inputs, classes = torch.split(finish(images, together), sizes), repeat(None)
            yield from zip(inputs, classes if labels is None else torch.split(labels, sizes), group, strict=False)

    def _load(
        self, epoch: int, shares: Sequence[Tensor], finish: Finish
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        loader = self._idle.pop() if self._idle else self._loader(self.workers)
        for share, (images, labels, indices) in zip(shares, loader.load(epoch, shares), strict=True):
            self._tell(share, indices)
            if labels is None and self.labels is not None:
                labels = self.labels[indices]
            inputs = finish(images.to(self.device, non_blocking=True), indices)
            yield inputs, None if labels is None else labels.to(self.device, non_blocking=True), indices
        # One that is left before its end is not kept: its workers are busy with what nobody wants.
        self._idle.append(loader)

    def close(self) -> None:
        """End the workers that wait for another epoch; who asks for one after all gets new ones."""
        while self._idle:
            self._idle.pop().close()

    def _loader(self, workers: int) -> Loader:
        source: Any = self.prepared.source
        if isinstance(source, Images):
            following = self._following if self.store.unreadable == "skip" else None
            reader: Any = ImageReader(source, self.transforms, self.prepared.shape, following)
        else:
            reader = ItemReader(source, self.transforms, self.seed)
        return Loader(reader, workers, self.prefetch, self.pin_memory and self.device.type == "cuda")

    @property
    def _following(self) -> Tensor:
        return successors((self.training, self.held), len(self.prepared))

    def _tell(self, wanted: Tensor, indices: Tensor) -> None:
        for index in wanted[wanted != indices].tolist():
            if index not in self._told:
                self._told.add(index)
                logger.warning(
                    "data: %s cannot be read, another stands in (%d so far)", self.describe(index), len(self._told)
                )
