"""The batches of a run: which samples, in which order, on which rank.

All of it is a pure function of (seed, epoch, samples consumed), so a run resumes at any sample, and the number of
workers changes nothing. Prefetched batches that were not consumed are simply made again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from attrs import define, evolve, field, validators
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from hookdiff.data.batch import Batch
from hookdiff.data.memory import InMemory, to_unit_range
from hookdiff.errors import UserError
from hookdiff.progress import LoopConfig
from hookdiff.randomness import derive_seed

_AT_ONCE = 1 << 20  # numbers that are fetched from memory in one go: 4 MiB

Sample = tuple[Tensor, int | None, int]  # c h w; label; index


@runtime_checkable
class Source(Protocol):
    """A map-style data set: `source[i]` is an image tensor (c h w), or a pair of one and its label.

    Images are uint8, or floats in [-1, 1]. A `source[i]` that augments may draw from `random`, `numpy.random` and
    torch's default generator: all three are seeded for the sample.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@define(eq=False)
class Feed:
    """Hands out the epochs of `source` in batches, this rank's share of each.

    `source` is an `InMemory` set, or anything with a length and `[i]` (see `Source`), which goes through a
    DataLoader. The keys after it belong to the config table [data].
    """

    source: InMemory | Source
    drop_last: bool = field(default=True, kw_only=True)  # leave out the last, smaller batch of an epoch
    workers: int = field(default=0, validator=validators.ge(0), kw_only=True)  # processes that load samples
    prefetch: int = field(default=2, validator=validators.ge(1), kw_only=True)  # batches ahead, per worker
    pin_memory: bool = field(default=True, kw_only=True)  # where the device is a GPU
    batch_size: int = field(init=False)  # over all ranks
    seed: int = field(init=False)
    device: torch.device = field(init=False)
    rank: int = field(init=False)
    num_ranks: int = field(init=False)

    @classmethod
    def of(cls, data: Feed | InMemory | Source | Tensor) -> Feed:
        """Return `data` as a Feed of its own: two Loops may be given the same."""
        if isinstance(data, Feed):
            return evolve(data)
        return cls(InMemory(data) if isinstance(data, Tensor) else data)

    def bind(self, config: LoopConfig, device: torch.device, rank: int = 0, num_ranks: int = 1) -> Feed:
        """Tell the feed whose batches it makes.

        Raises UserError when the source cannot fill one batch, or a batch not all ranks.
        """
        self.batch_size, self.seed, self.device = config.batch_size, config.seed, device
        self.rank, self.num_ranks = rank, num_ranks
        if isinstance(self.source, InMemory):
            self.source = self.source.to(device)
        if self.batch_size < num_ranks:
            raise UserError(f"batch_size is {self.batch_size}: too small for {num_ranks} ranks")
        if self.exhausted(0):
            way_out = "lower batch_size or set drop_last = false" if len(self.source) else "nothing to train on"
            raise UserError(f"the data has {len(self.source)} samples, batch_size is {self.batch_size}: {way_out}")
        return self

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, c h w; of the first, where only loading one tells."""
        if isinstance(self.source, InMemory):
            return tuple(self.source.images.shape[1:])
        return tuple(_Addressed(self.source, seed=0)[0, 0][0].shape)

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        total = len(self.source)
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
        return len(self.source) - start < least

    def order(self, epoch: int) -> Tensor:
        """Return the permutation of epoch `epoch`: (samples,), int64."""
        generator = Generator().manual_seed(derive_seed(self.seed, "data", epoch))
        return torch.randperm(len(self.source), generator=generator)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `epoch` from the sample number `start` of its order on."""
        order = self.order(epoch)
        parts = []
        while not self.exhausted(start):
            parts.append(order[start : start + self.batch_size])
            start += self.batch_size
        if isinstance(self.source, InMemory):
            yield from self._fetch(self.source, parts)
        else:
            yield from self._load(self.source, epoch, parts)

    def _fetch(self, source: InMemory, parts: Sequence[Tensor]) -> Iterator[Batch]:
        # Several small batches at once, then slices of them: the calls cost more than the pixels.
        at_once = max(1, _AT_ONCE // (self.batch_size * source.images[0].numel()))
        for first in range(0, len(parts), at_once):
            group = parts[first : first + at_once]
            shares = [part[self.rank :: self.num_ranks] for part in group]
            sizes = [len(share) for share in shares]
            images, labels = source.fetch(torch.cat(shares), self.device)
            inputs, classes = torch.split(images, sizes), repeat(None) if labels is None else torch.split(labels, sizes)
            for part, share, x, y in zip(group, shares, inputs, classes, strict=False):
                yield Batch(x, y, share, total=len(part))

    def _load(self, source: Source, epoch: int, parts: Sequence[Tensor]) -> Iterator[Batch]:
        cuda = self.device.type == "cuda"
        loader = DataLoader(
            _Addressed(source, self.seed),
            batch_sampler=[[(epoch, i) for i in part[self.rank :: self.num_ranks].tolist()] for part in parts],
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            pin_memory=self.pin_memory and cuda,
            collate_fn=_collate,
            generator=Generator(),  # of its own: it would draw from the default one
        )
        for part, (images, labels, indices) in zip(parts, loader, strict=True):
            inputs = to_unit_range(images.to(self.device, non_blocking=True))
            labels = None if labels is None else labels.to(self.device, non_blocking=True)
            yield Batch(inputs, labels, indices, total=len(part))


class _Addressed(Dataset[Sample]):
    """Seeds what augmentations draw from with (seed, epoch, sample), so that who loads a sample does not matter."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed = source, seed

    def __getitem__(self, address: tuple[int, int]) -> Sample:
        epoch, index = address
        seed = derive_seed(self.seed, "augment", epoch, part=index)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        item = self.source[index]
        image, label = item if isinstance(item, (tuple, list)) else (item, None)
        if not isinstance(image, Tensor):
            raise UserError(f"sample {index} of the data is a {type(image).__name__}, expected a tensor c h w")
        return image, None if label is None else int(label), index


def _collate(samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None, Tensor]:
    images, labels, indices = zip(*samples, strict=True)
    known = [label for label in labels if label is not None]
    return (
        torch.stack(images),
        torch.tensor(known) if len(known) == len(labels) else None,
        torch.tensor(indices),
    )
