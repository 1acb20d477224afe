"""The reader of pictures and of any other source: it keeps them in memory, or loads them with workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.feed_state import MOST
from hookdiff.data.memory import InMemory, to_device
from hookdiff.data.memory_reader import MemoryReader, PlainReader, are_pictures, checked_labels, hash_of
from hookdiff.data.reader import Codec, Parts, Stack, find_reader
from hookdiff.data.source import AnySource, Images, Source
from hookdiff.data.wrong_sources import adapted
from hookdiff.errors import UserError
from hookdiff.images.augment import augment, center_crop
from hookdiff.images.items import ItemKeys, read_item
from hookdiff.images.loader import Loader, Workers, read_batch, read_image
from hookdiff.images.shape_of import ShapeOf
from hookdiff.images.sized import Sized
from hookdiff.images.sizes import sizes_of
from hookdiff.images.store import Prepared, Store, prepare
from hookdiff.images.transforms import Transforms, size_text
from hookdiff.machine.randomness import default_generators_kept

logger = logging.getLogger("hookdiff")

_CPU = torch.device("cpu")


def feed_of(
    source: Any,
    transforms: Transforms | None = None,
    store: Store | None = None,
    *,
    workers: int = 0,
    prefetch: int = 2,
    image_key: str | None = None,
    label_key: str | None = None,
    **options: Any,
) -> Feed:
    """Return a Feed of any source: a tensor, an `InMemory` set, `Images` such as a `Folder`, or a `Source`.

    Args:
        source: a tensor n c h w, `InMemory`, `Images`, or any object with a length and `[i]`, such as a list. For
            a DataLoader, its data set is used.
        transforms: how pictures become samples.
        store: where decoded pictures are kept.
        workers: processes that load samples, unless the samples are in memory.
        prefetch: batches that each worker loads ahead.
        image_key: key of the picture in items that are dicts; None: "image" or "inputs".
        label_key: key of the label in such items; None: "label", if present.
        options: those of `Feed`, such as `held_out`.

    Raises:
        UserError: for an object that is no source, or that cannot be used with these options.
    """
    loading, keys = Workers(workers=workers, prefetch=prefetch), ItemKeys(image_key=image_key, label_key=label_key)
    return Feed(SourceReader(adapted(source), transforms or Transforms(), store or Store(), loading, keys), **options)


@define(eq=False, slots=False)
class OfSource(PlainReader):
    """A reader of the samples of `source`, or of their latents."""

    source: AnySource
    transforms: Transforms
    store: Store
    labels: Tensor | None = field(init=False)
    classes: Sequence[str] | None = field(init=False)
    left_out: Sequence[str] = field(init=False)
    unreadable: set[int] = field(init=False)
    cache_dir: str | None = field(init=False)
    seed: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.cache_dir = self.store.cache_dir
        self.labels, self.classes = checked_labels(self.source.labels, self.source.classes, len(self))

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        return self.source.name_of(index)


@define(eq=False, slots=False)
class SourceReader(OfSource):
    """Reads the samples of any `source` that `feed_of` takes."""

    workers: Workers
    keys: ItemKeys
    prepared: Prepared = field(init=False)  # the source after the first stage
    codec: Codec | None = field(init=False, default=None)
    device: torch.device = field(init=False, default=_CPU)
    _parts: Parts = field(init=False, default=())
    _kept: list[MemoryReader] = field(init=False, factory=list)  # readers of samples in memory, one a shape
    _reported: set[int] = field(init=False, factory=set)  # unreadable samples with a warning in the log
    _idle: list[Loader] = field(init=False, factory=list)  # loaders that wait for the next epoch

    def __attrs_post_init__(self) -> None:
        self.prepared = prepare(self.source, self.transforms, self.store, self.keys)
        self.left_out, self.unreadable = self.prepared.left_out, set(self.prepared.survey.unreadable)
        super().__attrs_post_init__()
        if sized := self.sized:
            self.shapes, self.shape_numbers = sized.shapes, sized.numbers
        if isinstance(self.prepared.samples, InMemory):
            self._kept = [MemoryReader(self.prepared.samples, self._finish)]
        elif sized:
            for number, part in enumerate(self.prepared.by_size):
                places, rows = torch.zeros(len(self), dtype=torch.int64), sized.rows(number, self.unreadable)
                places[rows] = torch.arange(len(rows))
                self._kept.append(MemoryReader(part, self._finish, places=places))
            self._leave_out_shapes()

    def _leave_out_shapes(self) -> None:
        """Leave out the shapes of which no sample can be decoded, because no pixels are there to replace them."""
        if (sized := self.sized) and (undecodable := self.prepared.survey.undecodable):
            broken = torch.zeros(len(self), dtype=torch.bool)
            broken[[*undecodable, *self.unreadable]] = True
            for number in {*sized.numbers[[*undecodable]].tolist()}:
                if broken[own := sized.rows(number)].all():
                    self.unreadable.update(own.tolist())

    @property
    def sized(self) -> Sized | None:
        """The sizes of the samples; None if all have one size."""
        return self.prepared.sized

    @property
    def samples(self) -> InMemory | Images | Source:
        return self.prepared.samples if self.shape_numbers is not None or not self._kept else self._kept[0].samples

    @property
    def kept(self) -> list[InMemory]:
        """The samples that are kept in memory or on disk, a set for each shape; none if they are read one by one."""
        return [reader.samples for reader in self._kept]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if not (shape := self.prepared.survey.shape):
            return tuple(self.first.inputs.shape[1:])
        size = self.transforms.square
        return shape if size is None else (shape[0], size, size)

    @cached_property
    def first(self) -> Batch:
        row = torch.zeros(1, dtype=torch.int64)
        if self.source.is_images:
            shape = self.shape if self.shape_numbers is None else self.shapes[int(self.shape_numbers[0])]
            return Batch(torch.zeros(1, *shape), None if self.labels is None else row)
        if self._kept:
            return self._kept[0].first
        images, labels, _, conditions = next(self._loader(0).load([(0, row.numpy())]))
        labels = row if labels is None and self.labels is not None else labels
        return self._finish(Batch(images, labels, conditions=conditions), None)

    @cached_property
    def are_pictures(self) -> bool:
        if self.source.is_images or len(self.shape) < 3:
            return self.source.is_images
        if self._kept:
            return self._kept[0].are_pictures
        with default_generators_kept():  # reading seeds these generators, and a run may be under way
            few, _ = next(self._groups(self._parts[:1]))
            images, *_ = next(self._loader(0).load([(0, few[:MOST].numpy())]))
        return are_pictures(images)

    def bound(self, seed: int, device: torch.device, parts: Parts) -> SourceReader:
        reader = copy(self)
        reader.seed, reader.device, reader._parts, reader._idle, reader._reported = seed, device, parts, [], set()
        reader._kept = [kept.bound(seed, device, parts) for kept in self._kept]
        undecodable, rows = list(self.prepared.survey.undecodable), None
        if reader._kept and undecodable:
            broken = torch.zeros(len(self), dtype=torch.bool)
            broken[[*undecodable, *self.unreadable]] = True
            rows = replacements(self._groups(parts), broken)
        for kept in reader._kept:
            kept.finish, kept.rows = reader._finish, rows
        return reader

    def _groups(self, parts: Parts) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield groups of samples of which one may replace another, and those that may if no sample of the group can.

        A group are the samples of one of `parts`; if they have several shapes, those of one shape.
        """
        if (numbers := self.shape_numbers) is None:
            yield from ((part, part) for part in parts)
            return
        for number in range(len(self.shapes)):
            groups = [part[numbers[part] == number] for part in parts]
            yield from ((group, groups[0]) for group in groups if len(group))

    def without_workers(self) -> SourceReader:
        """Return a copy that reads in this process, for a few samples."""
        reader = copy(self)
        reader.workers, reader._idle = evolve(self.workers, workers=0), []
        return reader

    def check(self) -> None:
        if self.transforms.random and len(self.shape) != 3:
            raise UserError(f"samples of {size_text(self.shape)} are no images c h w and cannot be augmented")

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        if not self._kept:
            yield from self._load(shares, epoch)
        elif (numbers := self.shape_numbers) is None:
            yield from self._kept[0].stacks(shares, epoch)
        else:
            for share in shares:
                yield from self._kept[int(numbers[share[0]])].stacks([share], epoch)

    def _finish(self, samples: Batch, epoch: int | None) -> Batch:
        if epoch is None:
            return center_crop(samples, self.transforms)
        return augment(samples, self.transforms, self.seed, epoch)

    def _load(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        loader = self._idle.pop() if self._idle else self._loader(self.workers.workers)
        try:
            # Numpy arrays, because sending a tensor to a worker takes a file descriptor.
            stacks = loader.load((epoch or 0, share.numpy()) for share in shares)
            for share, (images, labels, indices, conditions) in zip(shares, stacks, strict=True):
                self._report(share[share != indices])
                if labels is None and self.labels is not None:
                    labels = self.labels[indices]
                images = to_device(images, self.device)
                labels = None if labels is None else to_device(labels, self.device)
                conditions = {name: to_device(column, self.device) for name, column in conditions.items()}
                batch = self._finish(Batch(images, labels, indices, conditions=conditions), epoch)
                yield batch.inputs, labels, indices, batch.conditions
        except BaseException:  # also when the epoch is left before its end: the workers load more of its batches
            loader.close()
            raise
        self._idle.append(loader)

    def _report(self, unreadable: Tensor) -> None:
        for index in sorted(set(unreadable.tolist()) - self._reported):
            self._reported.add(index)
            name, count = self.describe(index), len(self._reported)
            logger.warning("data: %s cannot be read; another sample replaces it (%d so far)", name, count)

    def _loader(self, workers: int) -> Loader:
        sized = self.sized
        if self.source.is_images:
            circles = [[group for group, _ in self._groups(self._parts)], *([[*self._parts]] if sized else [])]
            orders = [_in_circles(groups, len(self)) for groups in circles] if self.store.unreadable == "skip" else []
            shape_of = sized.in_workers(False) if sized else ShapeOf((self.prepared.survey.shape,))
            read: Callable[..., Any] = partial(read_image, self.source, self.transforms, shape_of, orders)
        else:
            shapes = sized.in_workers(True) if sized else None
            read = partial(read_item, self.source, self.keys, self.transforms, shapes, self.seed)
        return Loader(partial(read_batch, read), workers, self.workers.prefetch, self.device.type == "cuda")

    def fingerprint(self) -> str | None:
        digest = self.source.fingerprint()
        if digest is None and self._kept:
            hashes = [hash_of(kept.samples.images) for kept in self._kept]
            numbers = self.shape_numbers
            digest = hashes[0] if numbers is None else repr((hashes, hash_of(numbers)))
        if digest is None:
            return None
        sizes = self.transforms.sized if self.transforms.has_sizes else self.transforms.square
        return repr((self.source.kind, digest, sizes, *self.transforms.first_stage))

    def sizes(self) -> Tensor:
        """Return height and width of the pictures, before they are resized; see `sizes_of`."""
        return self.sized.originals if self.sized else sizes_of(self.source, self.prepared.survey, self.keys)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _in_circles(groups: Iterable[Tensor], num: int) -> Any:
    """Return the next sample of each of `num` samples, in a circle for each group of samples, as an array of numpy.

    Sending a tensor to a worker takes a file descriptor.
    """
    successors = torch.arange(num)
    for group in groups:
        successors[group] = group.roll(-1)
    return successors.numpy()


def replacements(groups: Iterable[tuple[Tensor, Tensor]], unreadable: Tensor) -> Tensor:
    """Return the position of each sample, or of its first readable successor if the sample is `unreadable` (n, bool).

    Each group is sorted, and comes with the samples that replace its own if none of them can be read.

    Raises:
        UserError: if no sample of a group, nor of those, can be read.
    """
    positions = torch.arange(len(unreadable))
    for group, others in groups:
        broken, readable = group[unreadable[group]], group[~unreadable[group]]
        readable = readable if len(readable) else others[~unreadable[others]]
        if len(broken) and not len(readable):
            raise UserError("none of the samples of the data, of those held out, or of those of one size, can be read")
        positions[broken] = readable[torch.searchsorted(readable, broken) % max(1, len(readable))]
    return positions


def reader_of_source(feed: Feed) -> SourceReader:
    """Return the SourceReader of a `feed` that `feed_of` made. Other readers may wrap it."""
    reader = find_reader(feed, SourceReader)
    assert reader is not None
    return reader
